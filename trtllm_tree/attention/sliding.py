"""Which keys the rows of a tree see through a sliding window: measured by position, so by depth.

A row at position p sees the keys at positions above p - S, S being the layer's `sliding_window`: itself and the
S - 1 before it. A node's position is prefix_len + depth, whatever its slot; so siblings slide alike, the first key of
the prefix differs by row, and of the window's columns a row sees those less than S levels above it. Must not know
who the rows are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlidingRows:
    """What one `sliding_window` leaves of the rows of a forward.

    Attributes:
        first_keys: int32 [B, R], the first prefix key that each row sees; may lie behind the prefix.
        empty: bool [B, R], rows that see no prefix key.
        mask: int64 [B, R, words], the window columns that each row sees.
    """

    first_keys: torch.Tensor
    empty: torch.Tensor
    mask: torch.Tensor


def slide(
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    row_depths: torch.Tensor,
    column_depths: torch.Tensor,
    sliding_window: int,
) -> SlidingRows:
    """Cut what rows see, their `mask` [B, R, words] and the prefix, to `sliding_window` positions.

    Args:
        prefix_lens: int32 [B], P.
        row_depths: int32 [B, R], positions of the rows, less P; B may be 1.
        column_depths: int32 [B, W], positions of the window's columns, less P; B may be 1.
    """
    first_keys = (prefix_lens.unsqueeze(1) + row_depths - (sliding_window - 1)).clamp(min=0)
    near = row_depths.unsqueeze(2) - column_depths.unsqueeze(1) < sliding_window  # [B, R, W]
    padding = mask.shape[2] * 64 - near.shape[2]
    bits = torch.nn.functional.pad(near, (0, padding)).unflatten(2, (-1, 64)).long()
    # Distinct bits, so that their sum is their union; the highest one is the sign.
    words = (bits << torch.arange(64, device=mask.device)).sum(dim=3)
    return SlidingRows(first_keys, first_keys >= prefix_lens.unsqueeze(1), mask & words)
