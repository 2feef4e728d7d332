"""Would this run decode trees? Every line of the scope and every backend, put to one config, before anything is loaded.

Composes the scope, the leaves' rules and the resolution of backends over planned leaves. Must not know torch, so a
device is a compute capability, and models are the facts of their config.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trtllm_tree.config.host_rules import Host
from trtllm_tree.config.load import RunConfig
from trtllm_tree.errors import Problem
from trtllm_tree.support.leaf_rules import (
    FP8,
    LEAF_RULES,
    CallShape,
    Capability,
    PlannedLeaf,
    leaf_reasons,
    plan_host_leaf,
)
from trtllm_tree.support.model_facts import ModelFacts
from trtllm_tree.support.mtp import mtp_problems
from trtllm_tree.support.report import Refused
from trtllm_tree.support.resolve import PartAnswer, tree_answers, tree_blockers
from trtllm_tree.support.scope import SCOPE, scope_problems
from trtllm_tree.support.scope_line import ScopeLine

# A CPU, and one GPU of each generation that the leaves' rules tell apart.
MACHINES: dict[str, Capability | None] = {"cpu": None, "sm80": (8, 0), "sm90": (9, 0), "sm100": (10, 0)}
Verdict = Literal["blocked", "supported", "refused"]


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What is known of a run before it starts.

    Attributes:
        config: the file, read.
        host: the runtime.
        target: facts of the target; None where its config.json is not at hand.
        draft: facts of the draft head, likewise.
        capability: of the GPU that would be used; None is a CPU, or no way to tell.
    """

    config: RunConfig
    host: Host
    target: ModelFacts | None = None
    draft: ModelFacts | None = None
    capability: Capability | None = None

    @property
    def is_tree(self) -> bool:
        """Whether a draft tree is asked for."""
        return self.config.speculative is not None and self.config.speculative.is_tree

    @property
    def drafts_with_mtp(self) -> bool:
        """Whether the target's own MTP layer drafts, by our doing: TensorRT-LLM runs chains of it as ever."""
        spec = self.config.speculative
        is_ours = self.is_tree or self.host == "embedded"
        return spec is not None and spec.decoding_type == "MTP" and is_ours

    @property
    def drafter(self) -> ModelFacts | None:
        """Facts of whose layers draft: the head's, or for an MTP layer the target's, which are alike."""
        return self.target if self.drafts_with_mtp else self.draft

    def shape(self, facts: ModelFacts | None, capability: Capability | None) -> CallShape | None:
        """What the layers of a model ask of a leaf on a GPU of this capability; None where facts are missing."""
        if facts is None or facts.num_heads is None or facts.num_kv_heads is None or facts.head_dim is None:
            return None
        dtype = self._dtype(capability)
        # On TensorRT-LLM windows and sinks are refused by the scope, per layer and per call.
        here = self.host == "embedded"
        return CallShape(
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            page_size=self.config.engine.tokens_per_block,
            dtype=dtype,
            kv_dtype=FP8 if self.config.engine.kv_cache_dtype == "fp8" else dtype,
            value_dim=facts.value_dim,
            sliding_window=here and facts.sliding_window is not None,
            sinks=here and facts.sinks,
        )

    def _dtype(self, capability: Capability | None) -> str:
        """The target's, which the head is loaded in: the checkpoint's on a GPU, float32 on a CPU."""
        asked = self.config.engine.dtype
        if asked != "auto":
            return asked
        if capability is None and self.host == "embedded":
            return "float32"
        return self.target.dtype if self.target is not None and self.target.dtype else "bfloat16"


@dataclass(frozen=True)
class ScopeRow:
    """A line of the scope in one run."""

    line: ScopeLine
    verdict: Verdict
    reason: str


def run_problems(run: PlannedRun) -> list[Problem]:
    """Everything about the models and their backends that keeps this run from starting, all at once.

    A chain is judged by the embedded engine's rules for models alone; TensorRT-LLM runs it as ever.
    """
    problems = []
    if run.target is not None and (run.is_tree or run.host == "embedded"):
        problems += scope_problems(run.target, run.host)
    if run.target is not None and run.drafts_with_mtp:
        problems += mtp_problems(run.target, run.host)
    if run.is_tree and (leaves := planned_leaves(run, run.capability)) is not None:
        problems += tree_blockers(*leaves)
    return problems


def planned_leaves(run: PlannedRun, capability: Capability | None) -> tuple[PlannedLeaf, PlannedLeaf] | None:
    """The leaves of target and draft on a GPU of this capability; None where a model is not known.

    Without a GPU there is nothing to say about TensorRT-LLM.
    """
    target, draft = (run.shape(facts, capability) for facts in (run.target, run.drafter))
    if target is None or draft is None or (run.host == "tensorrt_llm" and capability is None):
        return None
    return plan_host_leaf(run.host, target, capability), plan_host_leaf(run.host, draft, capability)


def part_answers(run: PlannedRun) -> list[PartAnswer]:
    """What each planned backend answers for its part; empty where a model is not known."""
    leaves = planned_leaves(run, run.capability)
    return [] if leaves is None else tree_answers(*leaves)


def scope_rows(run: PlannedRun, problems: Iterable[Problem]) -> list[ScopeRow]:
    """Each line of the scope in this run, given everything that was found wrong with it."""
    problems = list(problems)
    rows = []
    for line in SCOPE:
        mine = [problem for problem in problems if line.owns(problem)]
        answer = line.answer(run.host)
        if mine:
            rows.append(ScopeRow(line, "blocked", "; ".join(problem.rule for problem in mine)))
        elif isinstance(answer, Refused):
            rows.append(ScopeRow(line, "refused", answer.reason))
        else:
            rows.append(ScopeRow(line, "supported", line.note))
    return rows


def leaf_table(run: PlannedRun) -> dict[str, dict[str, list[str]]]:
    """Why each leaf cannot serve the target, by leaf and machine; an empty list means that it can.

    Empty where the target is not known.
    """
    shapes = _shapes(run)
    return {
        leaf: {name: leaf_reasons(leaf, shape, MACHINES[name]) for name, shape in shapes.items()}
        for leaf in LEAF_RULES
        if shapes
    }


def serving_leaves(run: PlannedRun) -> dict[str, str | None]:
    """The leaf that the host would take for the target, by machine; None where none can serve it."""
    planned = {name: plan_host_leaf(run.host, shape, MACHINES[name]) for name, shape in _shapes(run).items()}
    return {name: None if leaf.reasons else leaf.name for name, leaf in planned.items()}


def _shapes(run: PlannedRun) -> dict[str, CallShape]:
    """What the target asks of a leaf on each machine; empty where it is not known."""
    found = {name: run.shape(run.target, capability) for name, capability in MACHINES.items()}
    return {name: shape for name, shape in found.items() if shape is not None}
