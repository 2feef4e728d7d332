"""Op `compact_window_rows`: moves the rows of an accepted path to the front of their window, in every region.

Owns the contract, the checks and the dispatch. It must not know what a row holds (KV of any dtype, hidden
rows, replay payloads): rows are moved as words of memory.

Legend: B requests, N nodes, G groups (slot numberings).
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.compact_window_rows.row_table import RowTable
from trtllm_tree.kernels.dispatch import use_triton


def compact_window_rows(
    table: RowTable, slots: torch.Tensor, path: torch.Tensor, *, max_depth: int | None = None
) -> None:
    """Move row slots[g, b, path[b, d]] to slots[g, b, d] for every d >= 1 with path[b, d] >= 0, in every region of g.

    Rows move in place, and byte for byte: all destinations get what the sources held before the call. A path
    0, 1, 2, ... moves nothing and costs one empty launch. The slots that a group has in one call are distinct,
    except for those of the dummy page, whose content means nothing.

    Args:
        table: the regions of G groups; their rows are mutated.
        slots: int32 [G, B, N], the slot of each window row; G and B may have any stride.
        path: int32 [B, N], accepted_path: increasing node ids from 0, then -1. So path[b, d] >= d.
        max_depth: only the columns d < max_depth of `path` are looked at (N if None); a path below S draft
            steps has at most S + 1 entries.

    `slots` and `path` have a contiguous last dimension. One launch; allocates nothing and never syncs on a GPU.

    Source: seed, "The tree is a parameter of the chain path".
    """
    num_nodes = path.shape[1]
    max_depth = num_nodes if max_depth is None else min(max_depth, num_nodes)
    assert path.dim() == 2, "path must be [B, N]"
    assert slots.shape == (len(table.groups), *path.shape), "slots must be [G, B, N]"
    for tensor in (slots, path):
        assert tensor.dtype == torch.int32, f"int32 expected, got {tensor.dtype}"
        assert tensor.stride(-1) == 1 or num_nodes == 1, "the last dimension must be contiguous"
        assert tensor.device == table.tiles.device, "table, slots and path must be on one device"
    if use_triton(path):
        from trtllm_tree.kernels.compact_window_rows.triton import launch as run
    else:
        from trtllm_tree.kernels.compact_window_rows.reference import reference as run
    run(table, slots, path, max_depth=max_depth)


__all__ = ["RowTable", "compact_window_rows"]
