"""Op `rejection_tokens`: the target's token behind every tree node, by recursive rejection of the node's children.

Owns the law, its noise, the checks and the dispatch. It must not know what becomes of the tokens: the walk along them
is the greedy one's, since a token that is no child's ends the path and any other leads on to that child.

Legend: B requests, N nodes, M = B * N rows, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._row_buffers import gathered_shape, row_buffers, workspace_shape
from trtllm_tree.kernels.dispatch import use_triton

__all__ = ["MAX_NODES", "gathered_shape", "rejection_tokens", "workspace_shape"]

MAX_NODES = 256


def rejection_tokens(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    parents: torch.Tensor,
    *,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
) -> torch.Tensor:
    """The token behind each node: that of its first accepted child, or a draw from what all of them leave.

    The children of a node c, the nodes j > c with parents[j] == c, are tried by rising id against target_probs, the
    law of the node's row: what `sampled_tokens` defines by the same parameters, in its units of 2**-40. A child that
    was chosen (the likeliest of the draft, say) is accepted with its target probability, since that which proposed it
    is a point mass; if it is rejected its probability becomes 0 and the rest is scaled up. A child that was drawn is
    accepted with min(1, target / draft probability); if it is rejected, target_probs becomes max(target_probs -
    draft_probs, 0) scaled up, and its draft probability becomes 0 and the rest is scaled up. Either way the token has
    the law of target_probs, whatever the tree (Leviathan et al. 2023; without replacement: Jeon et al. 2024).

    Sibling i is accepted when u * draft < target with u = (52 bits + 1/2) / 2**52, from the first two words of Philox
    with the seed as key and the counter (i, low half of position, high half, 1), in float64. The draw from what is
    left is Gumbel-max by `sampled_tokens`' noise, which has 0 in the counter's last place; so behind a node without
    children stands what `sampled_tokens` draws there. At temperature 0 the token is the argmax, and -1 stands for a
    row with any NaN. A row's token depends on its own arguments and its children only.

    Args:
        logits: float32, bfloat16 or float16 [M, V], last dim contiguous, rows may be strided.
        candidates: int32 [B, N], the token of each node; those outside the vocabulary are never accepted.
        parents: int32 [B, N], root -1.
        seeds: int64 [M], any value.
        positions: int64 [M], the position in its request that the token will have.
        temperatures: float32 [M], >= 0.
        top_ks: int32 [M]; <= 0 keeps all.
        top_ps: float32 [M]; >= 1 keeps all.
        min_ps: float32 [M]; <= 0 keeps all.
        draft_probs: float32 [B, N, Vd] contiguous, Vd <= V, the probabilities by target id (0 from Vd on) that each
            node's children were drawn from, in the order of their ids, without replacement. A row of zeros says
            that they were chosen. None: all were.
        tokens: int32 [M] output, allocated when None.
        workspace: int64 of at least `workspace_shape(M)`, contiguous, zero at first use; allocated when None. Calls
            that may overlap need one each. The reference ignores it.
        gathered: int64 of at least `gathered_shape(M)`, contiguous, allocated when None; otherwise as `workspace`.

    All one-dimensional tensors are contiguous. With tokens and both buffers given nothing is allocated and nothing
    syncs on a GPU (CUDA-graph safe).

    Returns:
        tokens, every element written.

    Source: seed, "Sampled verify keys noise by position", TreeRejectionSampler.
    """
    assert logits.dim() == 2 and logits.stride(1) == 1, "logits must be [M, V] with a contiguous last dim"
    num_rows, vocab_size = logits.shape
    tokens = logits.new_empty(num_rows, dtype=torch.int32) if tokens is None else tokens
    for name, tensor in (("candidates", candidates), ("parents", parents)):
        assert tensor.dtype == torch.int32 and tensor.shape == candidates.shape, (
            f"{name} must be int32 [B, N]"
        )
        assert tensor.stride(1) == 1 or tensor.shape[1] == 1, f"{name} must have a contiguous last dim"
    assert candidates.numel() == num_rows, "candidates and parents must have one node a row"
    assert candidates.shape[1] <= MAX_NODES, f"at most {MAX_NODES} nodes are supported"
    for name, tensor, dtype in (
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
        ("temperatures", temperatures, torch.float32),
        ("top_ks", top_ks, torch.int32),
        ("top_ps", top_ps, torch.float32),
        ("min_ps", min_ps, torch.float32),
        ("tokens", tokens, torch.int32),
    ):
        assert tensor.dtype == dtype and tensor.shape == (num_rows,), f"{name} must be {dtype} [M]"
        assert tensor.is_contiguous(), f"{name} must be contiguous"
    if draft_probs is not None:
        assert draft_probs.dtype == torch.float32 and draft_probs.is_contiguous(), (
            "draft_probs must be float32"
        )
        assert draft_probs.shape[:2] == candidates.shape, "draft_probs must be [B, N, Vd]"
        assert draft_probs.shape[2] <= vocab_size, "draft_probs must not have more ids than logits"
    parameters = (seeds, positions, temperatures, top_ks, top_ps, min_ps)
    if use_triton(logits):
        from trtllm_tree.kernels.rejection_tokens.triton import launch

        buffers = row_buffers(logits, workspace, gathered)
        launch(logits, candidates, parents, *parameters, draft_probs, tokens, *buffers)
    else:
        from trtllm_tree.kernels.rejection_tokens.reference import reference

        reference(logits, candidates, parents, *parameters, draft_probs, tokens)
    return tokens
