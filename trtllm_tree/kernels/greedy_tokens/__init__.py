"""Op `greedy_tokens`: the greedy choice of every logits row.

Owns the contract and the dispatch. It must not know what a row is (a decode row, a tree node).
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton


def greedy_tokens(logits: torch.Tensor, *, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Argmax of each row, exact ties to the lower id; -1 for a row with any NaN.

    Args:
        logits: float32, bfloat16 or float16 [M, V], last dim contiguous, rows may be strided.
        tokens: int32 [M] contiguous output, allocated when None; with it nothing is allocated and nothing syncs.

    Returns:
        tokens, every element written.
    """
    assert logits.dim() == 2 and logits.stride(1) == 1, "logits must be [M, V] with a contiguous last dim"
    tokens = logits.new_empty(logits.shape[0], dtype=torch.int32) if tokens is None else tokens
    assert tokens.dtype == torch.int32 and tokens.shape == (logits.shape[0],), "tokens must be int32 [M]"
    assert tokens.is_contiguous(), "tokens must be contiguous"
    if use_triton(logits):
        from trtllm_tree.kernels.greedy_tokens.triton import launch as run
    else:
        from trtllm_tree.kernels.greedy_tokens.reference import reference as run
    run(logits, tokens)
    return tokens
