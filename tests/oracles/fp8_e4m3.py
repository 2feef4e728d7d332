"""FP8 E4M3 from its definition: one sign bit, four of exponent (bias 7), three of mantissa; no infinity."""

from __future__ import annotations

from typing import Any

import torch

# 0 and the subnormals m * 2^-9, then the normals (8 + m) * 2^(e - 10); all bits set is NaN.
_GRID = torch.tensor(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)],
    dtype=torch.float64,
)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """`x` rounded to the nearest value of the format, ties to an even mantissa, saturating; in x's dtype."""
    size, grid = x.abs().double(), _GRID.to(x.device)
    # The neighbours of `size` on the grid; behind its end both are the largest value.
    above = torch.searchsorted(grid, size.nan_to_num(0.0)).clamp(max=len(grid) - 1)
    below = torch.where(grid[above] <= size, above, above - 1).clamp(min=0)
    middle = (grid[below] + grid[above]) / 2
    up = (size > middle) | ((size == middle) & (below % 2 == 1))
    rounded = torch.where(up, grid[above], grid[below])
    return torch.where(x.isnan(), x, torch.copysign(rounded, x.double()).to(x.dtype))


def rounding_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """For transformers: causal attention of a whole sequence over K/V rounded to E4M3, in float64.

    Q [1, Hq, T, D], K/V [1, Hkv, T, D]; returns [1, T, Hq, D].
    """
    group = query.shape[1] // key.shape[1]
    k, v = (to_e4m3(x).double().repeat_interleave(group, dim=1) for x in (key, value))
    future = query.new_ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    scores = (query.double() @ k.transpose(2, 3) * scaling).masked_fill(future, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).to(query.dtype), None
