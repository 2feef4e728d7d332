"""Invariant I8: the accepted path's KV moves to the window's front, attention layers only, once per cache group.

Each cache group has one address table over its physical K and V regions (layers that alias a region appear
once) and moves the rows at that group's own verify window. It copies words, so it never looks at a dtype.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.compact_window_rows import RowTable, compact_window_rows
from trtllm_tree.ports import KVPool


class KVCompactor:
    """Address tables of every target cache group, built when the pool is bound."""

    def __init__(self, pool: KVPool) -> None:
        self._tables = [RowTable.build(list(regions)) for regions in pool.group_regions()]

    def compact_verify_window(
        self, path: torch.Tensor, write_slots: tuple[torch.Tensor, ...], *, max_depth: int
    ) -> None:
        """Move row `path[b, d]` of request b's window to row d, in every group.

        Args:
            path: int32 [B, N], accepted path, -1 padded.
            write_slots: per group int32 [B, N], the window's KV slots.
            max_depth: longest possible path.
        """
        for table, slots in zip(self._tables, write_slots, strict=True):
            compact_window_rows(table, slots, path, max_depth=max_depth)
