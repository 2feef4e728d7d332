"""Torch reference of `draft_tree_expand`: add, sort stably, gather. It shares nothing with the kernel."""

from __future__ import annotations

import torch


def reference(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    *,
    step: int,
    base: int,
    entry_scores: torch.Tensor,
    entry_tokens: torch.Tensor,
    entry_parents: torch.Tensor,
    lane_entries: torch.Tensor,
    lane_scores: torch.Tensor,
    lane_tokens: torch.Tensor,
    lane_mask: torch.Tensor,
    next_hidden: torch.Tensor,
    window: int,
) -> None:
    """Grow by one step in place; arguments as in the op, `base` is the first entry id of the step."""
    num_requests, num_lanes, topk = scores.shape
    if step == 0:
        parent_scores = scores.new_zeros((num_requests, 1))
        parent_entries = lane_entries.new_full((num_requests, 1), -1)
        parent_mask = lane_mask.new_zeros((num_requests, 1, lane_mask.shape[-1]))
    else:
        parent_scores, parent_entries, parent_mask = lane_scores, lane_entries, lane_mask

    total = parent_scores[:, :, None] + scores.clamp(max=0)
    total = torch.where(total.isnan(), float("-inf"), total).flatten(1)
    span = slice(base, base + num_lanes * topk)
    entry_scores[:, span] = total
    entry_tokens[:, span] = tokens.flatten(1)
    entry_parents[:, span] = parent_entries.repeat_interleave(topk, dim=1)

    # [B, K]. A stable sort leaves equal scores in entry order.
    best = total.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    parent = (best // topk)[:, :, None]
    mask = parent_mask.gather(1, parent.expand(-1, -1, lane_mask.shape[-1]))
    slots = step * topk + torch.arange(topk, device=scores.device)
    words = torch.arange(lane_mask.shape[-1], device=scores.device)
    in_word = (slots[:, None] // 64 == words) & (slots[:, None] < window)
    lane_mask.copy_(mask | torch.where(in_word, torch.ones_like(words) << (slots[:, None] % 64), 0))
    lane_entries.copy_(base + best)
    lane_scores.copy_(total.gather(1, best))
    lane_tokens.copy_(tokens.flatten(1).gather(1, best))
    next_hidden.copy_(hidden.gather(1, parent.expand(-1, -1, hidden.shape[-1])))
