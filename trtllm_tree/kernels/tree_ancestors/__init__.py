"""Op `tree_ancestors`: depths and ancestor masks of a batch of trees, from their parents.

Owns the contract, the checks and the dispatch. It must not know where the parents come from.

Legend: B requests, N nodes, words = ceil(N / 64).
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton

MAX_NODES = 256


def tree_ancestors(
    parents: torch.Tensor,
    *,
    depths: torch.Tensor | None = None,
    ancestor_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Follow every node's parents up to its root.

    Bit `j % 64` of word `j // 64` of node i's mask is set iff j is i or an ancestor of i. A parent that is
    negative or not below its own node counts as no parent, so any content of `parents` gives a forest: the
    work is bounded. Writes the given outputs in place and then allocates nothing (CUDA-graph safe).

    Args:
        parents: int32 [B, N], N <= 256, last dim contiguous.
        depths: int32 [B, N] output, allocated when None.
        ancestor_mask: int64 [B, N, ceil(N / 64)] output, last dim contiguous, allocated when None.

    Returns:
        (depths, ancestor_mask): the number of proper ancestors, and the mask with the own bit set.

    Source: seed, sections "Position follows depth" and "One tree attention".
    """
    assert parents.dim() == 2 and parents.dtype == torch.int32, "parents must be int32 [B, N]"
    num_requests, num_nodes = parents.shape
    assert 1 <= num_nodes <= MAX_NODES, f"num_nodes must be in 1..{MAX_NODES}, got {num_nodes}"
    words = -(-num_nodes // 64)
    if depths is None:
        depths = torch.empty_like(parents, memory_format=torch.contiguous_format)
    if ancestor_mask is None:
        ancestor_mask = parents.new_empty((num_requests, num_nodes, words), dtype=torch.int64)
    assert depths.shape == parents.shape and depths.dtype == torch.int32, "depths must be int32 [B, N]"
    assert ancestor_mask.shape == (num_requests, num_nodes, words), "ancestor_mask must be [B, N, words]"
    assert ancestor_mask.dtype == torch.int64, "ancestor_mask must be int64"
    assert parents.stride(-1) == depths.stride(-1) == ancestor_mask.stride(-1) == 1, (
        "last dims must be contiguous"
    )

    if use_triton(parents):
        from trtllm_tree.kernels.tree_ancestors.triton import launch as run
    else:
        from trtllm_tree.kernels.tree_ancestors.reference import reference as run
    run(parents, depths=depths, ancestor_mask=ancestor_mask)
    return depths, ancestor_mask
