"""What draft trees go with and what they do not: each line of the seed's Scope, and the lines that are ours, as data.

`check` and docs/support.md print these lines, and `scope_problems` refuses models by them. Rules about options live
with the code that checks them (`config`) and are quoted here, never repeated. Must not know torch.
"""

from __future__ import annotations

from dataclasses import replace

from trtllm_tree.config.host_rules import Host
from trtllm_tree.errors import Problem
from trtllm_tree.support.model_facts import ModelFacts
from trtllm_tree.support.report import Refused
from trtllm_tree.support.scope_line import ScopeLine
from trtllm_tree.support.scope_own import OWN_LINES
from trtllm_tree.support.scope_seed import SEED_LINES

SCOPE: tuple[ScopeLine, ...] = (*SEED_LINES, *(replace(line, beyond_seed=True) for line in OWN_LINES))


def scope_problems(facts: ModelFacts, host: Host) -> list[Problem]:
    """Everything that a target of these facts asks for and `host` refuses."""
    problems: dict[str, Problem] = {}
    for line in SCOPE:
        answer = line.answer(host)
        if line.found is None or not isinstance(answer, Refused):
            continue
        for option, value in line.found(facts):
            # Lines about special cases come behind those about the option itself.
            name = f"model: {option}" if option != "layer_types" else f"model: {option} {value}"
            problems.setdefault(name, Problem(f"model: {option}", value, answer.reason, line.remedy))
    return list(problems.values())
