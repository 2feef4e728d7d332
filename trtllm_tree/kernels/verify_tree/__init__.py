"""Op `verify_tree`: the greedy walk down a tree along the target's tokens.

Owns the contract, the checks and the dispatch. It must not know how the target tokens were drawn, nor
what becomes of the path.

Legend: B requests, N nodes.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton

MAX_NODES = 256


def verify_tree(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    target_tokens: torch.Tensor,
    *,
    path: torch.Tensor | None = None,
    accept_len: torch.Tensor | None = None,
    predict: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk from the root to a child that holds the target's token, for as long as there is one.

    A child of node c is a node j > c with parents[j] == c; of several that hold target_tokens[c] the lowest
    is taken, so duplicate siblings are legal. A negative target token (a row of NaN logits) matches nothing.
    The walk ends after at most N nodes whatever `parents` holds.

    Args:
        tokens: int32 [B, N], the token of each node; the root's is not looked at.
        parents: int32 [B, N], root -1.
        target_tokens: int32 [B, N], the target's token after each node.
        path: int32 [B, N] output: accepted_path, node ids root first, increasing, -1 padded.
        accept_len: int32 [B] output: nodes on the path, root included, >= 1.
        predict: int32 [B, N] output: target_tokens[path[d]] for d < accept_len, the last one being the bonus
            token; -1 after it.

    Returns:
        (path, accept_len, predict), those given or new ones, every element written. N <= 256, the last
        dimension of every tensor is contiguous. Allocates nothing and never syncs when the outputs are
        given on a GPU.

    Source: seed, "The tree is a parameter of the chain path" and "Sampled verify keys noise by position".
    """
    path = torch.empty_like(tokens, memory_format=torch.contiguous_format) if path is None else path
    predict = torch.empty_like(path) if predict is None else predict
    accept_len = tokens.new_empty(tokens.shape[0]) if accept_len is None else accept_len
    assert 1 <= tokens.shape[1] <= MAX_NODES, f"{tokens.shape[1]} nodes, at most {MAX_NODES} are supported"
    for tensor in (tokens, parents, target_tokens, path, predict):
        assert tensor.dtype == torch.int32, f"int32 expected, got {tensor.dtype}"
        assert tensor.shape == tokens.shape, "all tree tensors must be [B, N]"
        assert tensor.stride(1) == 1 or tensor.shape[1] == 1, "the last dimension must be contiguous"
    assert accept_len.dtype == torch.int32, "accept_len must be int32"
    assert accept_len.shape == tokens.shape[:1], "accept_len must be [B]"
    assert accept_len.is_contiguous(), "accept_len must be contiguous"
    if use_triton(tokens):
        from trtllm_tree.kernels.verify_tree.triton import launch as run
    else:
        from trtllm_tree.kernels.verify_tree.reference import reference as run
    run(tokens, parents, target_tokens, path=path, accept_len=accept_len, predict=predict)
    return path, accept_len, predict
