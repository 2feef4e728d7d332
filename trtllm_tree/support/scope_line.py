"""What a line of the scope is: a wish, its answer on each host, and how to tell whether a run has that wish.

Must not know any line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtllm_tree.config.host_rules import EMBEDDED_RULE, TREE_REFUSALS, Host
from trtllm_tree.errors import Problem
from trtllm_tree.support.model_facts import ModelFacts
from trtllm_tree.support.report import Refused, Supported

Answer = Supported | Refused
# (option, value) of what a model asks for.
Asked = Sequence[tuple[str, object]]

# What a line about options is checked by.
OPTION = "config/host_rules.py, on the options"


@dataclass(frozen=True, kw_only=True)
class ScopeLine:
    """One line of the scope.

    Attributes:
        id: its name.
        what: what a user would ask for.
        embedded: the answer on the embedded host.
        tensorrt_llm: the answer on TensorRT-LLM.
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
    embedded: Answer
    tensorrt_llm: Answer
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

    def owns(self, problem: Problem) -> bool:
        """Whether `problem` is about this line."""
        if self.found is not None:
            return Refused(problem.rule) in (self.embedded, self.tensorrt_llm)
        if self.rule and problem.rule.startswith(self.rule):
            return True
        name = problem.option
        named = any(name == option or name.startswith(f"{option}: ") for option in self.options)
        return named and (not self.values or problem.value in self.values)


def keyed(id: str, what: str, *keys: str, beyond_seed: bool = False) -> ScopeLine:
    """A line that TensorRT-LLM's `keys` ask for, refused on both hosts by host_rules.py."""
    return ScopeLine(
        id=id,
        what=what,
        embedded=Refused(EMBEDDED_RULE),
        tensorrt_llm=Refused(TREE_REFUSALS[keys[0]]),
        checked=OPTION,
        options=keys,
        beyond_seed=beyond_seed,
    )


def both(
    id: str,
    what: str,
    reason: str,
    checked: str,
    *,
    options: tuple[str, ...] = (),
    values: tuple[object, ...] = (),
    found: Callable[[ModelFacts], Asked] | None = None,
    beyond_seed: bool = False,
    note: str = "",
) -> ScopeLine:
    """A line that both hosts refuse for one reason."""
    return ScopeLine(
        id=id,
        what=what,
        embedded=Refused(reason),
        tensorrt_llm=Refused(reason),
        checked=checked,
        options=options,
        values=values,
        found=found,
        beyond_seed=beyond_seed,
        note=note,
    )
