"""Queries for kernels that multiply an FP8 cache in FP8."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
_MAX = torch.finfo(FP8).max


def query_for(q: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """`q`, contiguous; over an FP8 cache rounded to it, unscaled and saturating."""
    q = q.contiguous()
    # Whether a conversion saturates by itself is not the same everywhere.
    return q.clamp(-_MAX, _MAX).to(FP8) if kv_dtype == FP8 else q
