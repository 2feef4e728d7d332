"""Op `draft_tree_expand`: one step of draft-tree growth; the best K of the scored children become lanes.

Owns the contract, the layout of the entry table, the checks and the dispatch. It must not know how a drafter
scores.

Legend: B requests, K lanes (topk), S draft steps, L lanes of this step, E = K + (S-1) K^2 entries, H hidden.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton

MAX_TOPK = 16


def first_entry(step: int, topk: int) -> int:
    """Id of the first entry that `step` records: K entries at step 0, K * K at each later step."""
    return 0 if step == 0 else topk + (step - 1) * topk * topk


def draft_tree_expand(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    *,
    step: int,
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
    """Turn one draft step's scored children into entries and the next step's lanes, all in place.

    Child c of lane r is entry `first_entry(step, K) + r * K + c`. Its cumulative log-probability is the
    lane's plus `min(score, 0)` in float32, NaN becoming -inf, so it never exceeds its parent's. The best K of
    this step's L * K children by (score descending, entry id ascending) become lanes 0..K-1, in that order.
    New lane r sees what its parent lane saw plus draft slot `step * K + r`, if that lies within the window.

    At step 0 the only lane is the root (score 0, entry -1, empty mask) and the lane arrays are not read.
    The kernel allocates nothing and never syncs (CUDA-graph safe). All last dims are contiguous.

    Args:
        scores: float32 [B, L, K] log-probabilities of the children; L = 1 at step 0, else K. K <= 16.
        tokens: int32 [B, L, K] their token ids.
        hidden: [B, L, H] hidden rows of the lanes, any dtype.
        step: draft step, from 0.
        entry_scores: float32 [B, E], entries of this step written.
        entry_tokens: int32 [B, E], entries of this step written.
        entry_parents: int32 [B, E], entries of this step written: the parent's entry id, -1 for the root.
        lane_entries: int32 [B, K], read and replaced.
        lane_scores: float32 [B, K], read and replaced.
        lane_tokens: int32 [B, K], replaced.
        lane_mask: int64 [B, K, max(1, ceil(window / 64))], read and replaced.
        next_hidden: [B, K, H], replaced by each lane's parent's row of `hidden`; must not alias `hidden`.
        window: slots of the lane window, (S - 1) * K.

    Source: EAGLE-2 (arXiv 2406.16858) section 4; seed, sections "Draft lanes" and "The drafter scores".
    """
    num_requests, num_lanes, topk = scores.shape
    base = first_entry(step, topk)
    hidden_size = hidden.shape[-1]
    assert 1 <= topk <= MAX_TOPK, f"topk must be in 1..{MAX_TOPK}, got {topk}"
    assert step >= 0 and num_lanes == (1 if step == 0 else topk), "L must be 1 at step 0 and K later"
    assert hidden.data_ptr() != next_hidden.data_ptr(), "hidden and next_hidden must not alias"
    assert hidden.dtype == next_hidden.dtype, "hidden and next_hidden must have one dtype"
    for name, tensor, shape, dtype in (
        ("scores", scores, (num_requests, num_lanes, topk), torch.float32),
        ("tokens", tokens, (num_requests, num_lanes, topk), torch.int32),
        ("hidden", hidden, (num_requests, num_lanes, hidden_size), hidden.dtype),
        ("next_hidden", next_hidden, (num_requests, topk, hidden_size), hidden.dtype),
        ("lane_entries", lane_entries, (num_requests, topk), torch.int32),
        ("lane_scores", lane_scores, (num_requests, topk), torch.float32),
        ("lane_tokens", lane_tokens, (num_requests, topk), torch.int32),
        ("lane_mask", lane_mask, (num_requests, topk, max(1, -(-window // 64))), torch.int64),
        ("entry_scores", entry_scores, (num_requests, entry_scores.shape[1]), torch.float32),
        ("entry_tokens", entry_tokens, entry_scores.shape, torch.int32),
        ("entry_parents", entry_parents, entry_scores.shape, torch.int32),
    ):
        assert tensor.shape == shape and tensor.dtype == dtype, f"{name} must be {dtype} {tuple(shape)}"
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"the last dim of {name} must be contiguous"
    assert base + num_lanes * topk <= entry_scores.shape[1], "this step's entries exceed the entry table"

    if use_triton(scores):
        from trtllm_tree.kernels.draft_tree_expand.triton import launch as run
    else:
        from trtllm_tree.kernels.draft_tree_expand.reference import reference as run
    run(
        scores,
        tokens,
        hidden,
        step=step,
        base=base,
        entry_scores=entry_scores,
        entry_tokens=entry_tokens,
        entry_parents=entry_parents,
        lane_entries=lane_entries,
        lane_scores=lane_scores,
        lane_tokens=lane_tokens,
        lane_mask=lane_mask,
        next_hidden=next_hidden,
        window=window,
    )
