"""Torch reference of `compact_window_rows`: the CPU path, on the region tensors themselves.

It must not know the tile table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trtllm_tree.kernels.compact_window_rows.row_table import RowTable


def reference(table: RowTable, slots: torch.Tensor, path: torch.Tensor, *, max_depth: int) -> None:
    """Move the rows; arguments as in the op."""
    path = path[:, :max_depth].long()
    depth = torch.arange(max_depth, device=path.device)
    request, to_row = ((path >= 0) & (path != depth) & (depth > 0)).nonzero(as_tuple=True)
    if not len(request):
        return
    for regions, group_slots in zip(table.groups, slots.long(), strict=True):
        source = group_slots[request, path[request, to_row]]
        target = group_slots[request, to_row]
        size = regions[0].shape[2]
        for region in regions:
            # Indexing has no kernels for every dtype (float8), but it has them for bytes.
            rows = region.view(torch.uint8)
            rows[target // size, :, target % size] = rows[source // size, :, source % size]
