"""Every op's benchmark by name. A new folder under kernels/ belongs here, or among those left out with a reason."""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_tree.bench.ops.attention import ATTENTION_OPS
from trtllm_tree.bench.ops.entry import OpBench
from trtllm_tree.bench.ops.mla import MLA_OPS
from trtllm_tree.bench.ops.round_glue import ROUND_OPS
from trtllm_tree.bench.ops.row_ops import ROW_OPS
from trtllm_tree.bench.ops.tree_ops import TREE_OPS
from trtllm_tree.errors import ConfigError, Problem

REGISTRY: dict[str, OpBench] = {
    entry.op: entry for entry in (*ATTENTION_OPS, *MLA_OPS, *ROW_OPS, *TREE_OPS, *ROUND_OPS)
}
NOT_MEASURED = {
    "prefix_attention": "has no kernel: it is the torch definition that prefills and CPU runs use",
    "rotate_append": "moves a few rows of one layer in one launch: the launch is what it takes",
}


def entries(names: Sequence[str]) -> list[OpBench]:
    """The entries of these names in the registry's order; all of them for no name.

    Raises:
        ConfigError: a name that is not in the registry.
    """
    if unknown := [name for name in names if name not in REGISTRY]:
        rule = "must be one of " + ", ".join(REGISTRY)
        raise ConfigError(
            [
                Problem(
                    "--op",
                    name,
                    rule,
                    f"It {NOT_MEASURED[name]}." if name in NOT_MEASURED else "Name another.",
                )
                for name in unknown
            ]
        )
    return [entry for name, entry in REGISTRY.items() if not names or name in names]
