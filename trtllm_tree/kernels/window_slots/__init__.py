"""Op `window_slots`: the cache slot of every row of a verify window.

Owns the contract, the checks and the dispatch. It must not know who allocates pages.

Legend: B requests.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton


def window_slots(
    first_positions: torch.Tensor,
    page_table: torch.Tensor,
    *,
    num_rows: int,
    page_size: int,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """slots[b, i] is the slot of position first_positions[b] + i: page * page_size + offset in the page.

    A position beyond the page table, and an entry < 0, mean the dummy page 0.

    Args:
        first_positions: int32 [B], >= 0.
        page_table: int32 [B, max_pages]; the row stride may exceed max_pages.
        num_rows: rows of the window, >= 1.
        page_size: rows of a page.
        slots: int32 [B, num_rows] output, rows contiguous; allocated if None.

    Returns:
        `slots`, every element written. Allocates nothing and never syncs when it is given on a GPU.

    Source: seed, "Position follows depth, slot follows node index" and "Draft lanes write the draft cache".
    """
    batch = first_positions.shape[0]
    slots = first_positions.new_empty(batch, num_rows) if slots is None else slots
    assert num_rows >= 1, "an empty window"
    assert page_size >= 1, "an empty page"
    for tensor in (first_positions, page_table, slots):
        assert tensor.dtype == torch.int32, f"int32 expected, got {tensor.dtype}"
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, "the last dimension must be contiguous"
    assert first_positions.dim() == 1, "first_positions must be [B]"
    assert page_table.dim() == 2, "page_table must be [B, max_pages]"
    assert page_table.shape[0] == batch, "page_table has another batch"
    assert slots.shape == (batch, num_rows), "slots must be [B, num_rows]"
    if use_triton(slots):
        from trtllm_tree.kernels.window_slots.triton import launch as run
    else:
        from trtllm_tree.kernels.window_slots.reference import reference as run
    run(first_positions, page_table, page_size=page_size, slots=slots)
    return slots
