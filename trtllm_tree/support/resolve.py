"""Invariant I15: what may run as a tree is decided once, at startup, and every blocker is reported together.

Each backend answers for itself; a composite never answers for its children, they are asked through
`child_backends()`. Must not know any concrete backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from trtllm_tree.errors import Problem, UnsupportedError
from trtllm_tree.support.report import Refused, TreeSupport


class Backend(Protocol):
    """The part of an attention or state backend that is asked here."""

    name: str

    def tree_support(self) -> TreeSupport:
        """This backend's own answer."""
        ...

    def child_backends(self) -> Sequence[Backend]:
        """The backends it routes to."""
        ...


def _walk(root: Backend) -> Iterator[Backend]:
    yield root
    for child in root.child_backends():
        yield from _walk(child)


def tree_blockers(target: Backend, draft: Backend) -> list[Problem]:
    """Every reason why trees cannot run with these two backend trees."""
    problems = []
    for part, root in (("verify", target), ("lanes", draft)):
        for backend in _walk(root):
            answer = getattr(backend.tree_support(), part)
            if isinstance(answer, Refused):
                remedy = "Use tree_topk=1 (a chain) or another attention backend."
                problems.append(Problem(f"{part} attention backend", backend.name, answer.reason, remedy))
    return problems


def resolve_tree_support(target: Backend, draft: Backend) -> None:
    """Refuse trees unless every backend supports its part.

    Raises:
        UnsupportedError: with all blockers.
    """
    if problems := tree_blockers(target, draft):
        raise UnsupportedError(problems)
