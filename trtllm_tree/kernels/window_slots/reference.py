"""Torch reference of `window_slots`: the CPU path. It must not know who allocates pages."""

from __future__ import annotations

import torch


def reference(
    first_positions: torch.Tensor, page_table: torch.Tensor, *, page_size: int, slots: torch.Tensor
) -> None:
    """Write `slots`; arguments as in the op."""
    max_pages = page_table.shape[1]
    row = torch.arange(slots.shape[1], device=slots.device)
    position = first_positions.long()[:, None] + row
    index = position // page_size
    page = page_table.long().gather(1, index.clamp(max=max_pages - 1)).clamp(min=0)
    page = torch.where(index < max_pages, page, 0)
    slots.copy_(page * page_size + position % page_size)
