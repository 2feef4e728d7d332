"""Torch reference of `tree_decode`: the CPU path, written from the maths in float32.

One request at a time: gathers all of its keys and takes one softmax. It must not know the kernel's tiles.
"""

from __future__ import annotations

import torch

_FP8_MAX = 448.0


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    *,
    window: int,
    scale: float,
    fp8_query: bool,
    out: torch.Tensor,
) -> None:
    """Write the attention output to `out`; arguments as in the op. Reads the lengths on the host."""
    num_rows, num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    query = _rounded(q, fp8_query)
    column = torch.arange(window, device=q.device)
    in_window = ((mask[:, :, column // 64] >> (column % 64)) & 1).bool()  # [B, R, W]

    for b, prefix_len in enumerate(prefix_lens.tolist()):
        position = torch.arange(prefix_len + window, device=q.device)
        visible = (position < prefix_len).repeat(num_rows, 1)  # [R, P + W]
        visible[:, prefix_len:] = in_window[b]
        seen = visible.any(dim=0)[:, None, None]
        page, offset = _slots(page_table[b], position, k_cache.shape[2])
        keys = k_cache[page, :, offset].float().masked_fill(~seen, 0.0)  # [P + W, Hkv, D]
        if v_cache is None:
            # A latent row's leading channels are its value.
            values = keys[..., : out.shape[3]]
        else:
            values = v_cache[page, :, offset].float().masked_fill(~seen, 0.0)

        grouped = query[b].reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("rhgd,chd->rhgc", grouped, keys) * scale
        scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        # A row that sees nothing has only -inf scores.
        weights = torch.where(visible.any(dim=1)[:, None, None, None], weights, 0.0)
        out[b].copy_(torch.einsum("rhgc,chd->rhgd", weights, values).reshape(out.shape[1:]))


def _rounded(q: torch.Tensor, fp8_query: bool) -> torch.Tensor:
    """The query in float32, as the op says it enters the product."""
    if fp8_query:
        return q.float().clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).float()
    return q.float()


def _slots(table: torch.Tensor, position: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, offset) of positions; unallocated ones are in page 0."""
    index = position // page_size
    page = table.long()[index.clamp(max=len(table) - 1)].clamp(min=0)
    return torch.where(index < len(table), page, 0), position % page_size
