"""The arithmetic of a draft tree's three sizes: which (K, S, N) are legal, and which N is chosen by default.

K = topk (lanes per draft step), S = num_steps (draft forwards), N = num_nodes (verify window, root included).
This file knows numbers and how an option is spelled in a message; it knows no config class and no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from trtllm_tree.errors import Problem

DEFAULT_TOPK, MAX_TOPK = 4, 16
DEFAULT_STEPS, MAX_STEPS = 5, 10
MIN_NODES, MAX_NODES = 2, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """What the user calls the three options, and whether the last counts the root (1) or not (0)."""

    topk: str
    steps: str
    nodes: str
    root: int
    prefix: str = ""


PYTHON_SPELLING = Spelling(topk="tree_topk", steps="num_steps", nodes="num_nodes", root=1)
TRTLLM_SPELLING = Spelling(
    topk="dynamic_tree_max_topK",
    steps="max_draft_len",
    nodes="max_total_draft_tokens",
    root=0,
    prefix="speculative_config.",
)


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def clamp(value: int, low: int, high: int) -> int:
    """The nearest number to `value` in [low, high]."""
    return max(low, min(value, high))


def num_entries(topk: int, steps: int) -> int:
    """E = K + (S - 1) * K^2, the candidates that a round scores."""
    return topk + (steps - 1) * topk * topk


def node_bounds(topk: int, steps: int) -> tuple[int, int]:
    """The least and the greatest legal N for a legal K and S; equal for a chain, and never empty.

    `(S - 1) * K <= N` keeps the draft writes of the lanes inside the next verify window (seed, "Draft lanes
    write the draft cache like any draft step"). It implies `S - 1 <= N`, the same bound for chain steps.
    """
    if topk == 1:
        return steps + 1, steps + 1
    return max(MIN_NODES, (steps - 1) * topk), min(MAX_NODES, 1 + num_entries(topk, steps))


def default_num_nodes(topk: int, steps: int) -> int:
    """N when none is asked for: the chain's S + 1, else 32 or the nearest legal count."""
    return clamp(32, *node_bounds(topk, steps))


def tree_problems(topk: object, steps: object, nodes: object, names: Spelling) -> list[Problem]:
    """Every rule that (K, S, N) breaks. Obeying all remedies at once gives a legal configuration.

    Args:
        topk: K as the user wrote it.
        steps: S as the user wrote it.
        nodes: N as the user wrote it, by the user's count; None means "choose for me".
        names: how the user spells them.
    """
    problems = _range_problems(names.prefix + names.topk, names.topk, topk, DEFAULT_TOPK, MAX_TOPK)
    problems += _range_problems(names.prefix + names.steps, names.steps, steps, DEFAULT_STEPS, MAX_STEPS)
    if nodes is None:
        return problems
    option = names.prefix + names.nodes
    if not is_int(nodes):
        remedy = f"Leave {names.nodes} out to have it chosen."
        return [*problems, Problem(option, nodes, f"must be an integer, is {type(nodes).__name__}", remedy)]
    if not is_int(topk) or not is_int(steps):
        return problems
    # A K or S out of range is judged as its own remedy will have it.
    k, s = clamp(topk, 1, MAX_TOPK), clamp(steps, 1, MAX_STEPS)
    count = nodes + 1 - names.root
    remedy = f"Set {names.nodes} to {clamp(count, *node_bounds(k, s)) - 1 + names.root}."
    return problems + [Problem(option, nodes, rule, remedy) for rule in _broken_rules(k, s, count, names)]


def _range_problems(option: str, name: str, value: object, default: int, high: int) -> list[Problem]:
    if not is_int(value):
        rule, remedy = f"must be an integer, is {type(value).__name__}", f"Set {name} to {default}."
        return [Problem(option, value, rule, remedy)]
    if 1 <= value <= high:
        return []
    return [Problem(option, value, f"1 <= {name} <= {high}", f"Set {name} to {clamp(value, 1, high)}.")]


def _broken_rules(k: int, s: int, n: int, names: Spelling) -> list[str]:
    count = f"N = {names.nodes}" + ("" if names.root else " + 1")
    where = f"({count} = {n}, K = {names.topk} = {k}, S = {names.steps} = {s})"
    rules = []
    if not MIN_NODES <= n <= MAX_NODES:
        rules.append(f"{MIN_NODES} <= N <= {MAX_NODES} {where}")
    if k == 1:
        if n != s + 1:
            rules.append(f"without a tree the nodes are a chain, so N = S + 1 = {s + 1} {where}")
        return rules
    if n > 1 + num_entries(k, s):
        rules.append(
            f"a tree has no more than N <= 1 + K + (S - 1) * K * K = {1 + num_entries(k, s)} nodes {where}"
        )
    if n < (s - 1) * k:
        rules.append(f"the draft lanes write (S - 1) * K = {(s - 1) * k} slots, which must be <= N {where}")
    return rules
