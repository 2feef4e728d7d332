"""sampled_tokens in torch: kept ids by sorting. Greedy rows cost nothing but a maximum.

Legend: R rows that draw, V vocabulary.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._row_law_torch import first_ids, gumbel, kept_of_sorted, words


def _filtered_draw(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Tokens int64 [R] of rows of float32 logits [R, V] without NaN."""
    vocab = logits.shape[1]
    top_ks = torch.where(top_ks > 0, top_ks, vocab).clamp(max=vocab)
    ids = first_ids(logits, int(top_ks.max()))
    logits = logits.gather(1, ids)
    temperatures, top_ks, top_ps, min_ps = (x.unsqueeze(1) for x in (temperatures, top_ks, top_ps, min_ps))
    kept, _ = kept_of_sorted(logits, temperatures, top_ks, top_ps, min_ps)
    # Noise is the dearest part: only as far as any row keeps something.
    count = int(kept.sum(dim=1).max())
    logits, ids, kept = logits[:, :count], ids[:, :count], kept[:, :count]
    drawn = words(ids // 4, seeds, positions).gather(2, (ids % 4).unsqueeze(2)).squeeze(2)
    scores = (logits + temperatures * gumbel(drawn)).masked_fill(~kept, -torch.inf)
    # Not in id order: of equal scores the lowest id, and of nothing but -inf a kept one.
    best = kept & (scores == scores.max(dim=1, keepdim=True).values)
    return ids.masked_fill(~best, vocab).min(dim=1).values


def reference(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    tokens: torch.Tensor,
    *,
    filters: bool = True,
) -> None:
    """Fill `tokens` int32 [M]; arguments as in the op."""
    peak, best = logits.max(dim=-1)
    tokens.copy_(best.masked_fill(peak.isnan(), -1))
    vocab = logits.shape[1]
    is_filtered = filters & ((top_ks > 0) & (top_ks < vocab) | (top_ps < 1) | (min_ps > 0))
    draws = (temperatures > 0) & ~peak.isnan()
    rows = (draws & ~is_filtered).nonzero().squeeze(1)
    if len(rows):
        groups = torch.arange(-(-vocab // 4), device=logits.device).unsqueeze(0)
        drawn = words(groups, seeds[rows], positions[rows]).flatten(1)[:, :vocab]
        scores = logits[rows].float() + temperatures[rows].unsqueeze(1) * gumbel(drawn)
        tokens[rows] = scores.argmax(dim=1).int()
    rows = (draws & is_filtered).nonzero().squeeze(1)
    if len(rows):
        parameters = (x[rows] for x in (seeds, positions, temperatures, top_ks, top_ps, min_ps))
        tokens[rows] = _filtered_draw(logits[rows].float(), *parameters).int()
