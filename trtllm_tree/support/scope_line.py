"""What a line of the scope is: a wish, its answer on each host, and how to tell whether a run has that wish.

Must not know any line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trtllm_tree.config.host_rules import EMBEDDED_RULE, TREE_REFUSALS, Host
from trtllm_tree.errors import Problem
from trtllm_tree.support.model_facts import ModelFacts
from trtllm_tree.support.report import Refused, Supported

Answer = Supported | Refused
# (option, value) of what a model asks for.
Asked = Sequence[tuple[str, object]]

# Where it is decided whether a run asks for a line: by its options, its target's config.json, each request.
OPTION = "config/host_rules.py, on the options"
MODEL = "support/scope.py, on the model's config.json"
REQUEST = "config/sampling.py, for each request"


class Answers(NamedTuple):
    """What each host says to one wish."""

    embedded: Answer
    tensorrt_llm: Answer


EVERYWHERE = Answers(Supported(), Supported())


def embedded_only(reason: str) -> Answers:
    """TensorRT-LLM refuses it."""
    return Answers(Supported(), Refused(reason))


def tensorrt_llm_only(reason: str) -> Answers:
    """The embedded host refuses it."""
    return Answers(Refused(reason), Supported())


def nowhere(reason: str, *, on_tensorrt_llm: str | None = None) -> Answers:
    """Both refuse it, for one reason or for two."""
    return Answers(Refused(reason), Refused(on_tensorrt_llm or reason))


@dataclass(frozen=True, kw_only=True)
class ScopeLine:
    """One line of the scope.

    Attributes:
        id: its name.
        what: what a user would ask for.
        answers: who serves it.
        checked: where it is decided whether a run asks for it.
        options: names of options whose problems belong to this line; a head's go by their first word.
        values: the option's values that this line is about, where lines share an option; empty for all.
        rule: how the rules begin whose problems belong to this line.
        found: the options and values with which a model asks for it; for lines that config.json decides.
        remedy: what to do about a refusal that `found` leads to.
        beyond_seed: no line of the seed's Scope.
        note: what a user should know besides.
    """

    id: str
    what: str
    answers: Answers
    checked: str
    options: tuple[str, ...] = ()
    values: tuple[object, ...] = ()
    rule: str = ""
    found: Callable[[ModelFacts], Asked] | None = None
    remedy: str = "Use another model."
    beyond_seed: bool = False
    note: str = ""

    def answer(self, host: Host) -> Answer:
        """The answer on `host`."""
        return self.embedded if host == "embedded" else self.tensorrt_llm

    @property
    def embedded(self) -> Answer:
        """The answer on the embedded host."""
        return self.answers.embedded

    @property
    def tensorrt_llm(self) -> Answer:
        """The answer on TensorRT-LLM."""
        return self.answers.tensorrt_llm

    def owns(self, problem: Problem) -> bool:
        """Whether `problem` is about this line."""
        if self.found is not None:
            return Refused(problem.rule) in self.answers
        if self.rule and problem.rule.startswith(self.rule):
            return True
        name = problem.option
        named = any(name == option or name.startswith(f"{option}: ") for option in self.options)
        return named and (not self.values or problem.value in self.values)


def keyed(id: str, what: str, *keys: str) -> ScopeLine:
    """A line that TensorRT-LLM's `keys` ask for, refused on both hosts by host_rules.py."""
    return ScopeLine(
        id=id,
        what=what,
        answers=nowhere(EMBEDDED_RULE, on_tensorrt_llm=TREE_REFUSALS[keys[0]]),
        checked=OPTION,
        options=keys,
    )
