"""Writes docs/support.md from the scope and the leaves' rules: `python -m trtllm_tree.support.page`, or `make docs`.

Owns the page's words between the tables, nothing in the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trtllm_tree.support.leaf_rules import FP8, HOST_LEAVES, LEAF_RULES, CallShape, LeafRules, plan_host_leaf
from trtllm_tree.support.plan import MACHINES
from trtllm_tree.support.report import Refused, Supported
from trtllm_tree.support.scope import SCOPE
from trtllm_tree.support.scope_line import ScopeLine

_INTRO = """# Support

What this page answers: what draft trees go with, on which host, and who says so. It is generated from the data that
the code refuses by (`make docs` writes it, a test compares). `trtllm-tree check CONFIG --model DIR` puts the same data
to one config, and reports everything that blocks it at once, without loading weights.

The TensorRT-LLM host has never met the real package: it is built over what was read in its source, and tested on a
contract double ([tensorrt_llm.md](tensorrt_llm.md)). How far each feature has been seen to work is in
[verification.md](verification.md).

## Scope

The lines of the specification's Scope.
"""

_BEYOND = """## Beyond the Scope

Lines that the specification does not have: larger trees, other hosts' features, and models that it does not speak of.
"""

_LEAVES = """## Attention backends

A target's backends answer for the part *verify*, a draft's for *lanes*. A leaf computes both alike, so it has one
answer for both; a backend that routes to others answers for itself only, and they are asked too. All answers are
collected before anything is bound (`support/resolve.py`). Where a cell is empty, the leaf has no such rule.
"""

_SERVING = """### Which leaf serves

The first that can, in each host's order, here in bfloat16 with pages of 32 rows; "-" where none can.
{orders}.
"""

_GQA = CallShape(
    num_heads=32, num_kv_heads=8, head_dim=128, page_size=32, dtype="bfloat16", kv_dtype="bfloat16"
)
_MLA = replace(_GQA, num_heads=16, num_kv_heads=1, head_dim=576, value_dim=512)
_KINDS = {
    "grouped heads, head_dim 128": _GQA,
    "the same, FP8 cache": replace(_GQA, kv_dtype=FP8),
    "grouped heads, head_dim 80": replace(_GQA, head_dim=80),
    "grouped heads, head_dim 112": replace(_GQA, head_dim=112),
    "latent rows (MLA), 512 + 64 channels, 16 heads": _MLA,
    "the same, FP8 cache, 16 heads": replace(_MLA, kv_dtype=FP8),
    "sliding windows": replace(_GQA, sliding_window=True),
    "attention sinks": replace(_GQA, sinks=True),
}


def render() -> str:
    """The page."""
    seed = [line for line in SCOPE if not line.beyond_seed]
    beyond = [line for line in SCOPE if line.beyond_seed]
    orders = "; ".join(
        f"{host} tries {', '.join(f'`{name}`' for name in names)}" for host, names in HOST_LEAVES.items()
    )
    parts = [
        _INTRO,
        _scope_table(seed),
        _BEYOND,
        _scope_table(beyond),
        _LEAVES,
        _leaf_table(),
        _SERVING.format(orders=orders),
        _serving_table(),
    ]
    return "\n".join(parts)


def _scope_table(lines: Iterable[ScopeLine]) -> str:
    header = ("line", "embedded", "TensorRT-LLM", "decided in", "note")
    rows = [
        (line.what, _answer(line.embedded), _answer(line.tensorrt_llm), _place(line.checked), line.note)
        for line in lines
    ]
    return _table(header, rows)


def _leaf_table() -> str:
    header = (
        "leaf",
        "verify, lanes",
        *MACHINES,
        "head_dim",
        "page size",
        "heads",
        "dtype",
        "sliding windows",
        "sinks",
    )
    rows = [
        (
            f"`{name}`",
            rules.what + (f"; {rules.package.remedy}" if rules.package else ""),
            *("yes" if rules.runs_on(capability) else "no" for capability in MACHINES.values()),
            _head_dims(rules),
            ", ".join(map(str, rules.page_sizes)),
            _heads(rules),
            ", ".join(rules.dtypes),
            "yes" if rules.sliding_window else "no",
            "yes" if rules.sinks else "no",
        )
        for name, rules in LEAF_RULES.items()
    ]
    return _table(header, rows)


def _serving_table() -> str:
    header = ("layers", *(f"{host}, {machine}" for host in HOST_LEAVES for machine in _machines(host)))
    rows = []
    for kind, shape in _KINDS.items():
        cells = []
        for host in HOST_LEAVES:
            # The scope refuses these on TensorRT-LLM whatever a leaf can do.
            is_refused = host != "embedded" and (shape.sliding_window or shape.sinks)
            for machine in _machines(host):
                leaf = plan_host_leaf(host, shape, MACHINES[machine])
                cells.append("-" if is_refused or leaf.reasons else f"`{leaf.name}`")
        rows.append((kind, *cells))
    return _table(header, rows)


def _machines(host: str) -> list[str]:
    return [name for name, capability in MACHINES.items() if host == "embedded" or capability is not None]


def _head_dims(rules: LeafRules) -> str:
    latent = [f"{value} + {dim - value} latent" for dim, value in rules.latent_dims]
    return ", ".join([*map(str, rules.head_dims), *latent])


def _heads(rules: LeafRules) -> str:
    if rules.max_head_ratio is not None:
        return f"at most {rules.max_head_ratio} a KV head"
    if rules.max_heads is not None:
        return f"at most {', or '.join(map(str, (rules.max_heads, *rules.other_heads)))}"
    return ""


def _answer(answer: Supported | Refused) -> str:
    return f"no: {answer.reason}" if isinstance(answer, Refused) else "yes"


def _place(checked: str) -> str:
    """A file of the package becomes a link."""
    path, comma, rest = checked.partition(",")
    return f"[{path}](../trtllm_tree/{path}){comma}{rest}" if path.endswith(".py") else checked


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(render())
