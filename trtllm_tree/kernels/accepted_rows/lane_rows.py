"""Where the lanes of a tree's round stand: an output of `accepted_rows`. It must not know what a lane drafts.

Legend: B requests, S draft steps, L rows of all lanes of a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LaneRows:
    """Where the lanes of a round stand, behind the accepted rows.

    Attributes:
        positions: int64 [B, S - 1] output: frontier + j.
        slots: int32 [B, L] output: the cache slot of position frontier + i, page * page_size + offset. A position
            beyond the page table, and an entry < 0, mean the dummy page 0.
        page_table: int32 [B, max_pages] of the draft cache.
        page_size: KV rows of a page.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    page_size: int

    def check(self, batch: int) -> None:
        """Assert shapes, dtypes and strides for B = `batch`."""
        assert self.page_size >= 1, "an empty page"
        assert self.positions.dtype == torch.int64, "lane positions must be int64"
        assert self.slots.dtype == self.page_table.dtype == torch.int32, "lane slots and pages must be int32"
        for tensor in (self.positions, self.slots, self.page_table):
            assert tensor.dim() == 2 and tensor.shape[0] == batch, "lane tensors must have B rows"
            assert tensor.shape[1] >= 1, "lanes without rows"
            assert tensor.stride(1) == 1 or tensor.shape[1] == 1, "lane rows must be contiguous"
