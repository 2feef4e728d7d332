"""Op `greedy_tokens`: the greedy choice of every logits row.

Owns the contract, the workspace layout, the checks and the dispatch. It must not know what a row is (a decode row,
a tree node).

Legend: M rows, V vocabulary.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton


def workspace_shape(num_rows: int) -> tuple[int, int]:
    """Shape of the int64 workspace.

    A row holds its best logit and id so far as one number, and a counter of finished tiles. It must be zero when it
    is first used; the op leaves it zero.
    """
    return num_rows, 2


def greedy_tokens(
    logits: torch.Tensor, *, tokens: torch.Tensor | None = None, workspace: torch.Tensor | None = None
) -> torch.Tensor:
    """Argmax of each row, exact ties to the lower id; -1 for a row with any NaN.

    Args:
        logits: float32, bfloat16 or float16 [M, V], last dim contiguous, rows may be strided.
        tokens: int32 [M] contiguous output, allocated when None.
        workspace: int64 of at least `workspace_shape(M)`, contiguous, zero at first use; allocated when None. Calls
            that may overlap need one each. The reference ignores it.

    With both given nothing is allocated and nothing syncs on a GPU (CUDA-graph safe).

    Returns:
        tokens, every element written.
    """
    assert logits.dim() == 2 and logits.stride(1) == 1, "logits must be [M, V] with a contiguous last dim"
    num_rows = logits.shape[0]
    tokens = logits.new_empty(num_rows, dtype=torch.int32) if tokens is None else tokens
    assert tokens.dtype == torch.int32 and tokens.shape == (num_rows,), "tokens must be int32 [M]"
    assert tokens.is_contiguous(), "tokens must be contiguous"
    if use_triton(logits):
        from trtllm_tree.kernels.greedy_tokens.triton import launch

        needed = workspace_shape(num_rows)
        workspace = logits.new_zeros(needed, dtype=torch.int64) if workspace is None else workspace
        assert workspace.dtype == torch.int64 and workspace.is_contiguous(), "workspace must be int64 rows"
        assert workspace.shape[0] >= needed[0] and workspace.shape[1:] == needed[1:], (
            f"workspace is not {needed}"
        )
        launch(logits, tokens, workspace)
    else:
        from trtllm_tree.kernels.greedy_tokens.reference import reference

        reference(logits, tokens)
    return tokens
