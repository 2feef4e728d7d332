"""Op `tree_ancestors`: depths and ancestor masks of a batch of trees, from their parents.

Owns the contract, the checks and the dispatch. It must not know who made the parents.

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
    slots: torch.Tensor | None = None,
    loaded_parents: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Follow every node's parents up to its root.

    Bit `j % 64` of word `j // 64` of node i's mask is set iff j is i or an ancestor of i. A parent that is
    negative or not below its own node counts as no parent, so any content of `parents` gives a forest: the
    work is bounded. Writes the given outputs in place and then allocates nothing (CUDA-graph safe).

    With `slots` the same launch loads a verify step: the trees are the rows `slots` of `parents`, which is then
    a map [num_slots, N], and the window's positions move from vc + i to vc + depth[i]. The last four arguments
    are given together or not at all.

    Args:
        parents: int32 [B, N] (or the map), N <= 256, last dim contiguous.
        depths: int32 [B, N] output, allocated when None.
        ancestor_mask: int64 [B, N, ceil(N / 64)] output, last dim contiguous, allocated when None.
        slots: int64 [B], row of each request's tree; several pad rows may share one.
        loaded_parents: int32 [B, N] output: parents[slots].
        positions: int32 or int64 [B, N], `shift` is added in place.
        shift: int64 [B, N] output: depths[b, i] - i.

    All last dims are contiguous.

    Returns:
        (depths, ancestor_mask): the number of proper ancestors, and the mask with the own bit set.

    Source: seed, sections "Position follows depth" and "One tree attention".
    """
    assert parents.dim() == 2 and parents.dtype == torch.int32, "parents must be int32 [B, N]"
    num_nodes = parents.shape[1]
    num_requests = parents.shape[0] if slots is None else slots.shape[0]
    shape = (num_requests, num_nodes)
    assert 1 <= num_nodes <= MAX_NODES, f"num_nodes must be in 1..{MAX_NODES}, got {num_nodes}"
    words = -(-num_nodes // 64)
    if depths is None:
        depths = parents.new_empty(shape)
    if ancestor_mask is None:
        ancestor_mask = parents.new_empty((num_requests, num_nodes, words), dtype=torch.int64)
    assert depths.shape == shape and depths.dtype == torch.int32, "depths must be int32 [B, N]"
    assert ancestor_mask.shape == (num_requests, num_nodes, words), "ancestor_mask must be [B, N, words]"
    assert ancestor_mask.dtype == torch.int64, "ancestor_mask must be int64"
    assert parents.stride(-1) == depths.stride(-1) == ancestor_mask.stride(-1) == 1, (
        "last dims must be contiguous"
    )
    load = (slots, loaded_parents, positions, shift)
    assert len({tensor is None for tensor in load}) == 1, "a step is loaded with all of its tensors or none"
    if slots is not None and loaded_parents is not None and positions is not None and shift is not None:
        assert slots.dtype == torch.int64 and slots.shape == (num_requests,), "slots must be int64 [B]"
        assert slots.is_contiguous(), "slots must be contiguous"
        assert loaded_parents.dtype == torch.int32 and shift.dtype == torch.int64, "int32 and int64 expected"
        assert positions.dtype in (torch.int32, torch.int64), "positions must be integers"
        for tensor in (loaded_parents, positions, shift):
            assert tensor.shape == shape, "loaded_parents, positions and shift must be [B, N]"
            assert tensor.stride(-1) == 1 or num_nodes == 1, "last dims must be contiguous"

    if use_triton(parents):
        from trtllm_tree.kernels.tree_ancestors.triton import launch as run
    else:
        from trtllm_tree.kernels.tree_ancestors.reference import reference as run
    run(
        parents,
        depths=depths,
        ancestor_mask=ancestor_mask,
        slots=slots,
        loaded_parents=loaded_parents,
        positions=positions,
        shift=shift,
    )
    return depths, ancestor_mask
