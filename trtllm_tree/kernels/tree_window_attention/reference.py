"""Torch reference of `tree_window_attention`: the CPU path, written from the maths in float32.

Gathers the tail and window keys of every request into one dense block and takes one softmax over it with
the partial as one more term. It must not know the kernel's tiles.
"""

from __future__ import annotations

import math

import torch


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse2: torch.Tensor,
    *,
    window: int,
    causal_prefix: bool,
    scale: float,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the attention output to `out`; arguments as in the op."""
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    tail = num_rows - 1 if causal_prefix else 0
    column = torch.arange(-tail, window, device=q.device)
    row = torch.arange(num_rows, device=q.device)
    position = prefix_lens.long()[:, None] + column  # [B, C]

    # Keys the partial of each row covers, [B, R].
    covered = prefix_lens.long()[:, None].expand(batch, num_rows)
    if causal_prefix:
        covered = covered - num_rows + 1 + row
    in_tail = (column < 0) & (position[:, None] >= covered.clamp(min=0)[:, :, None])
    j = column.clamp(min=0)
    in_window = (column >= 0) & ((mask[:, :, j // 64] >> (j % 64)) & 1).bool()
    visible = in_tail | in_window  # [B, R, C]

    seen = visible.any(dim=1)[:, :, None, None]
    keys = _gather(k_cache, page_table, position).masked_fill(~seen, 0.0)  # [B, C, Hkv, D]
    if v_cache is None:
        values = keys[..., : out.shape[3]]
    else:
        values = _gather(v_cache, page_table, position).masked_fill(~seen, 0.0)

    grouped = q.float().reshape(batch, num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("brhgd,bchd->brhgc", grouped, keys) * scale
    scores = scores.masked_fill(~visible[:, :, None, None, :], -torch.inf)

    # The partial is one term with score ln(2) * lse2 whose value is prefix_out.
    has_partial = (covered > 0)[:, :, None]
    partial_score = torch.where(has_partial, prefix_lse2, -torch.inf) * math.log(2.0)
    partial_value = torch.where(has_partial[..., None], prefix_out.float(), 0.0)
    all_scores = torch.cat([scores.flatten(2, 3), partial_score[..., None]], dim=-1)  # [B, R, Hq, C + 1]
    if sinks is not None:
        all_scores = torch.cat([all_scores, sinks[:, None].expand(*all_scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(all_scores, dim=-1)
    weights = torch.where(all_scores.isneginf().all(dim=-1, keepdim=True), 0.0, weights)

    # A sink's weight has no value to go to.
    own, partial_weight = weights[..., : len(column)].reshape(scores.shape), weights[..., len(column), None]
    result = torch.einsum("brhgc,bchd->brhgd", own, values).reshape(out.shape)
    out.copy_(result + partial_weight * partial_value)


def _gather(cache: torch.Tensor, page_table: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rows of `cache` at `position` [B, C] as float32 [B, C, Hkv, D]; unallocated positions read page 0."""
    page_size, max_pages = cache.shape[2], page_table.shape[1]
    index = position.clamp(min=0) // page_size
    page = page_table.long().gather(1, index.clamp(max=max_pages - 1)).clamp(min=0)
    page = torch.where(index < max_pages, page, 0)
    if cache.element_size() > 1:
        return cache[page, :, position % page_size].float()
    # torch before 2.10 cannot index FP8 on a CPU.
    return cache.view(torch.uint8)[page, :, position % page_size].view(cache.dtype).float()
