"""Torch reference of `rotate_append`: the CPU path. It must not know what the rows are."""

from __future__ import annotations

import torch

_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    interleaved: bool,
    q_out: torch.Tensor,
) -> None:
    """Write `q_out` and the caches; arguments as in the op."""
    if cos_sin is not None and positions is not None:
        turns = cos_sin[positions.clamp(0, cos_sin.shape[0] - 1)]
        q, k = _rotate(q, turns, interleaved), _rotate(k, turns, interleaved)
    q_out.copy_(q)
    stored = slots >= 0
    page_size = k_cache.shape[2]
    pages, offsets = slots[stored].long() // page_size, slots[stored].long() % page_size
    for cache, rows in ((k_cache, k), (v_cache, v)):
        if cache.dtype != rows.dtype:
            rows = rows.float().clamp(-_E4M3_MAX, _E4M3_MAX)
        cache[pages, :, offsets] = rows[stored].to(cache.dtype)


def _rotate(x: torch.Tensor, turns: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Turn the leading channels of x [T, H, D] by turns [T, F, 2]."""
    width = 2 * turns.shape[1]
    cos, sin = turns[:, None, :, 0], turns[:, None, :, 1]
    head, rest = x[..., :width].float(), x[..., width:]
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    head = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((head.to(x.dtype), rest), dim=-1)
