"""Torch reference of `tree_ancestors`: the transitive closure of the parent relation as a dense matrix.

It shares nothing with the kernel.
"""

from __future__ import annotations

import torch


def reference(
    parents: torch.Tensor,
    *,
    depths: torch.Tensor,
    ancestor_mask: torch.Tensor,
    slots: torch.Tensor | None = None,
    loaded_parents: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> None:
    """Fill the outputs; arguments as in the op."""
    if slots is not None:
        parents = parents[slots]
    num_requests, num_nodes = parents.shape
    node = torch.arange(num_nodes, device=parents.device)
    is_parent = (parents[:, :, None] == node) & (node < node[:, None])
    # [B, N, N]: row i holds the nodes that i reaches. Each square doubles how far up that goes.
    reach = (is_parent | (node == node[:, None])).float()
    for _ in range((num_nodes - 1).bit_length()):
        reach = (reach @ reach).clamp(max=1)

    depths.copy_(reach.sum(-1) - 1)
    if loaded_parents is not None and positions is not None and shift is not None:
        loaded_parents.copy_(parents)
        shift.copy_(depths - node)
        positions.add_(shift)
    words = ancestor_mask.shape[-1]
    bits = torch.nn.functional.pad(reach.long(), (0, words * 64 - num_nodes))
    shift = torch.arange(64, device=parents.device)
    # Distinct powers of two never carry, so the sum is a bitwise OR, the sign bit included.
    ancestor_mask.copy_((bits.view(num_requests, num_nodes, words, 64) << shift).sum(-1))
