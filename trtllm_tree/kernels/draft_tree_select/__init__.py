"""Op `draft_tree_select`: the best N - 1 scored candidates of a draft tree, numbered depth first.

Owns the contract, the checks and the dispatch. It must not know how candidates were scored or grown.

Legend: B requests, N nodes, E entries.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton

MAX_NODES = 256


def draft_tree_select(
    entry_scores: torch.Tensor,
    entry_tokens: torch.Tensor,
    entry_parents: torch.Tensor,
    root_tokens: torch.Tensor,
    *,
    num_nodes: int,
    tokens: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    node_scores: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    future_tokens: torch.Tensor | None = None,
    future_parents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select the nodes of the verify window and number them depth first, better siblings first.

    Node 0 is the root. The rest are the best N - 1 entries by (score descending, entry id ascending), NaN
    counting as -inf. A child scores at most what its parent does and has the higher id, so it ranks behind
    its parent: the kept set is a tree, and its likeliest path is 0, 1, 2, ... A kept entry whose parent is
    not kept, or does not rank before it, hangs on the root, so that any content gives a tree of N nodes.
    Deterministic. With outputs given the kernel allocates nothing and never syncs (CUDA-graph safe).

    Args:
        entry_scores: float32 [B, E] cumulative log-probabilities, E >= N - 1.
        entry_tokens: int32 [B, E].
        entry_parents: int32 [B, E] entry id of the parent, -1 for the root.
        root_tokens: int32 [B], any stride.
        num_nodes: N, root included, <= 256.
        tokens: int32 [B, N] output, allocated when None.
        parents: int32 [B, N] output: -1 for the root, else below the own index; allocated when None.
        node_scores: float32 [B, N] output: 0 for the root; allocated when None.
        slots: int64 [B], or None to write the maps no rows.
        future_tokens: int32 [num_slots, N], given with `slots`: row slots[b] gets tokens[b]. Pad rows may share a
            slot, whose row then mixes theirs: still tokens, and still parents below their own node.
        future_parents: int32 [num_slots, N], likewise parents[b].

    Returns:
        (tokens, parents, node_scores), every element written. All last dims but root_tokens' are contiguous.

    Source: EAGLE-2 (arXiv 2406.16858) section 4; seed, section "Tree construction is deterministic".
    """
    num_requests, num_entries = entry_scores.shape
    assert 1 <= num_nodes <= MAX_NODES, f"num_nodes must be in 1..{MAX_NODES}, got {num_nodes}"
    assert num_nodes - 1 <= num_entries, f"{num_nodes} nodes need {num_nodes - 1} entries, got {num_entries}"
    shape = (num_requests, num_nodes)
    tokens = entry_tokens.new_empty(shape) if tokens is None else tokens
    parents = entry_parents.new_empty(shape) if parents is None else parents
    node_scores = entry_scores.new_empty(shape) if node_scores is None else node_scores
    for name, tensor, expected, dtype in (
        ("entry_scores", entry_scores, entry_scores.shape, torch.float32),
        ("entry_tokens", entry_tokens, entry_scores.shape, torch.int32),
        ("entry_parents", entry_parents, entry_scores.shape, torch.int32),
        ("tokens", tokens, shape, torch.int32),
        ("parents", parents, shape, torch.int32),
        ("node_scores", node_scores, shape, torch.float32),
    ):
        assert tensor.shape == expected and tensor.dtype == dtype, f"{name} must be {dtype} {tuple(expected)}"
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"the last dim of {name} must be contiguous"
    assert root_tokens.shape == (num_requests,), "root_tokens must be [B]"
    assert root_tokens.dtype == torch.int32, "root_tokens must be int32"
    published = (slots, future_tokens, future_parents)
    assert len({tensor is None for tensor in published}) == 1, "slots and both maps are given together"
    if slots is not None and future_tokens is not None and future_parents is not None:
        assert slots.dtype == torch.int64 and slots.shape == (num_requests,), "slots must be int64 [B]"
        assert slots.is_contiguous(), "slots must be contiguous"
        for tensor in (future_tokens, future_parents):
            assert tensor.dtype == torch.int32 and tensor.shape[1:] == (num_nodes,), "maps are int32 [*, N]"
            assert tensor.stride(1) == 1 or num_nodes == 1, "the last dim of a map must be contiguous"

    if use_triton(entry_scores):
        from trtllm_tree.kernels.draft_tree_select.triton import launch as run
    else:
        from trtllm_tree.kernels.draft_tree_select.reference import reference as run
    run(
        entry_scores,
        entry_tokens,
        entry_parents,
        root_tokens,
        tokens=tokens,
        parents=parents,
        node_scores=node_scores,
        slots=slots,
        future_tokens=future_tokens,
        future_parents=future_parents,
    )
    return tokens, parents, node_scores
