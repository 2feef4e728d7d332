"""Page tables and lengths in the form that libraries read: raw pointers, no strides, no dummy entries."""

from __future__ import annotations

import torch


def dense_table(page_table: torch.Tensor, *, multiple: int = 1) -> torch.Tensor:
    """int32 [B, n] contiguous, n rounded up to a multiple; entries < 0 and added columns name page 0.

    Kernels that take the table as a pointer ignore strides, and would use an entry < 0 as an address.
    """
    batch, width = page_table.shape
    table = page_table.new_zeros(batch, -(-width // multiple) * multiple)
    table[:, :width] = page_table.clamp(min=0)
    return table


def nonempty_lens(prefix_lens: torch.Tensor) -> torch.Tensor:
    """`prefix_lens` with 0 raised to 1.

    A prefix of no keys then looks like one of a single key, whose page exists because the window begins
    there. Rows that cover no key hold garbage in both cases, and the cascade tells them by the true count.
    """
    return prefix_lens.clamp(min=1)
