"""Plain torch for prefix attention: gather the pages, then a masked softmax in float32."""

from __future__ import annotations

import math

import torch


def _gather(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Keys or values of `pages` [B, n] as float32 [B, Hkv, n * page_size, D]."""
    batch, count = pages.shape
    _, heads, page_size, dim = cache.shape
    # torch before 2.10 cannot index FP8 on a CPU, but it can index bytes.
    storage = cache if cache.element_size() > 1 else cache.view(torch.uint8)
    rows = storage[pages.long()].view(cache.dtype)  # [B, n, Hkv, page_size, D]
    return rows.transpose(1, 2).reshape(batch, heads, count * page_size, dim).float()


def prefix_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    causal: bool,
    max_kv_len: int,
    scale: float,
    first_keys: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `prefix_attention`."""
    batch, rows, q_heads, dim = q.shape
    kv_heads, page_size = k_cache.shape[1], k_cache.shape[2]
    group = q_heads // kv_heads
    num_pages = min(page_table.shape[1], max(1, -(-max_kv_len // page_size)))
    keys = _gather(k_cache, page_table[:, :num_pages])
    values = keys[..., :value_dim] if v_cache is None else _gather(v_cache, page_table[:, :num_pages])
    position = torch.arange(keys.shape[2], device=q.device)
    covered = kv_lens.long().unsqueeze(1).expand(batch, rows)  # [B, R]
    if causal:
        covered = covered - (rows - 1) + torch.arange(rows, device=q.device)
    seen = position < covered.unsqueeze(2)  # [B, R, P]
    if first_keys is not None:
        seen &= position >= first_keys.long().unsqueeze(2)
    # A slot that no row sees may hold NaN, and 0 * NaN would leak through the product.
    values = values.masked_fill(~seen.any(dim=1)[:, None, :, None], 0.0)

    folded = q.float().view(batch, rows, kv_heads, group, dim).permute(0, 2, 1, 3, 4)  # [B, Hkv, R, G, D]
    scores = folded.reshape(batch, kv_heads, rows * group, dim) @ keys.transpose(2, 3)
    scores = scores.view(batch, kv_heads, rows, group, -1) * (scale * math.log2(math.e))
    scores = scores.masked_fill(~seen[:, None, :, None, :], -torch.inf)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp2(scores - peak.masked_fill(peak == -torch.inf, 0.0))
    total = weights.sum(dim=-1, keepdim=True)  # [B, Hkv, R, G, 1]
    out = weights.view(batch, kv_heads, rows * group, -1) @ values
    out = out.view(batch, kv_heads, rows, group, -1) / total.clamp_min(1e-30)
    lse2 = (peak + torch.log2(total)).squeeze(-1)  # -inf where nothing is seen
    out = out.permute(0, 2, 1, 3, 4).reshape(batch, rows, q_heads, -1)
    # With one query head per KV head the reshape is a view whose heads are strided.
    lse2 = lse2.permute(0, 2, 1, 3).reshape(batch, rows, q_heads).contiguous()
    return out.to(q.dtype), lse2
