"""Torch reference of `verify_tree`: the CPU path.

Finds the matching child of every node at once, then follows these links from the root. It must not know
the kernel's walk.
"""

from __future__ import annotations

import torch


def reference(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    target_tokens: torch.Tensor,
    *,
    path: torch.Tensor,
    accept_len: torch.Tensor,
    predict: torch.Tensor,
) -> None:
    """Write path, accept_len and predict; arguments as in the op."""
    batch, num_nodes = tokens.shape
    node = torch.arange(num_nodes, device=tokens.device)
    is_child = (parents[:, None, :] == node[:, None]) & (node > node[:, None])  # [B, parent, child]
    matches = is_child & (tokens[:, None, :] == target_tokens[:, :, None]) & (target_tokens >= 0)[:, :, None]
    # Id N stands for "no such node" and leads to itself.
    following = torch.where(matches, node, num_nodes).amin(dim=2)
    following = torch.cat([following, following.new_full((batch, 1), num_nodes)], dim=1)

    steps = [node.new_zeros(batch, 1)]
    for _ in range(num_nodes - 1):
        steps.append(following.gather(1, steps[-1]))
    walk = torch.cat(steps, dim=1)
    on_path = walk < num_nodes
    path.copy_(torch.where(on_path, walk, -1))
    accept_len.copy_(on_path.sum(dim=1))
    predict.copy_(torch.where(on_path, target_tokens.gather(1, walk.clamp(max=num_nodes - 1)), -1))
