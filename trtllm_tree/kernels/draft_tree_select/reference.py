"""Torch reference of `draft_tree_select`: a stable sort, then preorder positions from subtree sizes.

Nodes are first numbered by rank (root 0, then best first), where a parent always precedes its children. Then

    position(x) = sum of 1 + size(subtrees of a's better siblings) over a = x and its ancestors below the root

It shares nothing with the kernel.
"""

from __future__ import annotations

import torch


def reference(
    entry_scores: torch.Tensor,
    entry_tokens: torch.Tensor,
    entry_parents: torch.Tensor,
    root_tokens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    node_scores: torch.Tensor,
    slots: torch.Tensor | None,
    future_tokens: torch.Tensor | None,
    future_parents: torch.Tensor | None,
) -> None:
    """Fill the outputs; arguments as in the op."""
    num_requests, num_nodes = tokens.shape
    num_entries = entry_scores.shape[1]
    rank = torch.arange(num_nodes, device=entry_scores.device)
    scores = torch.where(entry_scores.isnan(), float("-inf"), entry_scores)
    # [B, N-1]. A stable sort leaves equal scores in entry order.
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, : num_nodes - 1]

    # The extra column stands for every parent that is no entry. It maps to the root, as do entries not kept.
    rank_of = kept.new_zeros((num_requests, num_entries + 1))
    rank_of.scatter_(1, kept, rank[1:].expand(num_requests, -1))
    parent_entry = entry_parents.gather(1, kept).long()
    parent_entry = torch.where((parent_entry < 0) | (parent_entry >= num_entries), num_entries, parent_entry)
    parent = rank_of.gather(1, parent_entry)
    parent = torch.where(parent < rank[1:], parent, 0)
    parent = torch.cat((parent.new_full((num_requests, 1), -1), parent), dim=1)

    # [B, N, N]: row x holds x and its ancestors. Each square doubles how far up that goes.
    reach = ((parent[:, :, None] == rank) | (rank == rank[:, None])).float()
    for _ in range((num_nodes - 1).bit_length()):
        reach = (reach @ reach).clamp(max=1)
    size = reach.sum(1)
    better_sibling = (parent[:, :, None] == parent[:, None, :]) & (rank < rank[:, None])
    skipped = 1 + (better_sibling * size[:, None, :]).sum(-1)
    skipped[:, 0] = 0
    position = (reach * skipped[:, None, :]).sum(-1).long()

    parent_position = position.gather(1, parent.clamp(min=0))
    parents.scatter_(1, position, torch.where(parent < 0, -1, parent_position).int())
    tokens.scatter_(1, position, torch.cat((root_tokens[:, None], entry_tokens.gather(1, kept)), dim=1))
    node_scores.scatter_(1, position, torch.nn.functional.pad(scores.gather(1, kept), (1, 0)))
    if slots is not None and future_tokens is not None and future_parents is not None:
        future_tokens.index_copy_(0, slots, tokens)
        future_parents.index_copy_(0, slots, parents)
