"""Invariant I8: the accepted path's KV moves to the window's front, attention layers only, once per cache group.

One table holds the physical K and V regions of every cache group (layers that alias a region appear once), and
one launch moves each group's rows at its own verify window. It copies words, so it never looks at a dtype.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.compact_window_rows import RowTable, compact_window_rows
from trtllm_tree.ports import KVPool


class KVCompactor:
    """The table of the target's cache groups, built when the pool is bound."""

    def __init__(self, pool: KVPool) -> None:
        self._table = RowTable.build(pool.group_regions())

    def compact_verify_window(self, path: torch.Tensor, write_slots: torch.Tensor, *, max_depth: int) -> None:
        """Move row `path[b, d]` of request b's window to row d, in every group.

        Args:
            path: int32 [B, N], accepted path, -1 padded.
            write_slots: int32 [G, B, N], per group the window's KV slots.
            max_depth: longest possible path.
        """
        compact_window_rows(self._table, write_slots, path, max_depth=max_depth)
