"""Invariant I15: what may run as a tree is decided once, at startup, and every blocker is reported together.

Each backend answers for itself; a composite never answers for its children, they are asked through
`child_backends()`. Must not know any concrete backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from trtllm_tree.errors import Problem, UnsupportedError
from trtllm_tree.support.report import Refused, Supported, TreeSupport

CHAIN_REMEDY = "Use tree_topk=1 (a chain) or another attention backend."
SAMPLER_RULE = "verifies chains only"
SAMPLER_REMEDY = "Use tree_topk=1 (a chain) or another sampling backend."


class Backend(Protocol):
    """The part of an attention or state backend that is asked here."""

    @property
    def name(self) -> str:
        """What it is called in reports."""
        ...

    def tree_support(self) -> TreeSupport:
        """This backend's own answer."""
        ...

    def child_backends(self) -> Sequence[Backend]:
        """The backends it routes to."""
        ...


class Sampler(Protocol):
    """The part of a sampling backend that is asked here."""

    @property
    def name(self) -> str:
        """What it is called in reports."""
        ...

    @property
    def supports_tree_verify(self) -> bool:
        """Whether it decides which rows of a tree are kept."""
        ...


@dataclass(frozen=True)
class PartAnswer:
    """What one backend answered for the part that it would play.

    Attributes:
        part: "verify" for backends of the target, "lanes" for those of the draft.
        backend: its name.
        answer: for this part.
    """

    part: str
    backend: str
    answer: Supported | Refused

    @property
    def option(self) -> str:
        """What a problem of this part is called."""
        return f"{self.part} attention backend"


def tree_answers(target: Backend, draft: Backend) -> list[PartAnswer]:
    """The answer of every backend below `target` and `draft`, parents first.

    A backend that several composites share, or both trees, is asked once.
    """
    answers: list[PartAnswer] = []
    asked: dict[int, TreeSupport] = {}
    # The walked lists keep every backend alive, so that its id stays its own.
    walked = [("verify", list(_walk(target, {}))), ("lanes", list(_walk(draft, {})))]
    for part, backends in walked:
        for backend in backends:
            if id(backend) not in asked:
                asked[id(backend)] = backend.tree_support()
            answers.append(PartAnswer(part, backend.name, getattr(asked[id(backend)], part)))
    return answers


def tree_blockers(target: Backend, draft: Backend, sampler: Sampler | None = None) -> list[Problem]:
    """Every reason why trees cannot run with these two backend trees, and with this sampling backend if it is known."""
    problems = [
        Problem(found.option, found.backend, found.answer.reason, CHAIN_REMEDY)
        for found in tree_answers(target, draft)
        if isinstance(found.answer, Refused)
    ]
    if sampler is not None and not sampler.supports_tree_verify:
        problems.append(Problem("sampling backend", sampler.name, SAMPLER_RULE, SAMPLER_REMEDY))
    return problems


def resolve_tree_support(target: Backend, draft: Backend, sampler: Sampler) -> None:
    """Refuse trees unless every backend supports its part. Binds nothing; to be called before anything is.

    Args:
        sampler: the sampling backend, or its class.

    Raises:
        UnsupportedError: with all blockers.
    """
    if problems := tree_blockers(target, draft, sampler):
        raise UnsupportedError(problems)


def _walk(root: Backend, seen: dict[int, Backend]) -> Iterator[Backend]:
    if id(root) in seen:
        return
    seen[id(root)] = root
    yield root
    for child in root.child_backends():
        yield from _walk(child, seen)
