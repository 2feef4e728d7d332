"""Op `sampled_tokens`: the seeded draw of every logits row, each with its own sampling parameters.

Owns the law, the noise, the checks and the dispatch. It must not know what a row is (a decode
row, a tree node) or how its position came about.

Legend: M rows, V vocabulary.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._row_buffers import gathered_shape, row_buffers, workspace_shape
from trtllm_tree.kernels.dispatch import use_triton

__all__ = ["gathered_shape", "sampled_tokens", "workspace_shape"]


def sampled_tokens(
    logits: torch.Tensor,
    *,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    tokens: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
    filters: bool = True,
) -> torch.Tensor:
    """Gumbel-max draw of each row, keyed by its seed and position; -1 for a row with any NaN.

    Ids are ordered by logit, ties by lower id. With p_i proportional to exp(logit_i / temperature), the kept ids are
    the first top_k; of these the shortest beginning that holds at least top_p of their probability, one id at least;
    and of these the ones with p_i >= min_p * max p. The token is the kept id with the largest
    logit_i + temperature * g_i, ties to the lower id, where g_i = -log(-log(u_i)), u_i = (bits + 1/2) / 2**32, and
    bits is word i % 4 of Philox4x32-10 (Salmon et al. 2011) with the two halves of the seed as its key, low first,
    and the counter (i // 4, low half of position, high half, 0). At temperature 0 that is the argmax.

    Probabilities are compared as multiples of 2**-40 of the largest, whose sum no order of adding changes.
    A row's token depends on its own arguments only.

    Args:
        logits: float32, bfloat16 or float16 [M, V], last dim contiguous, rows may be strided.
        seeds: int64 [M], any value.
        positions: int64 [M], the position in its request that the drawn token will have.
        temperatures: float32 [M], >= 0.
        top_ks: int32 [M]; <= 0 keeps all.
        top_ps: float32 [M]; >= 1 keeps all.
        min_ps: float32 [M]; <= 0 keeps all.
        tokens: int32 [M] output, allocated when None.
        workspace: int64 of at least `workspace_shape(M)`, contiguous, zero at first use; allocated when None. Calls
            that may overlap need one each. The reference ignores it.
        gathered: int64 of at least `gathered_shape(M)`, contiguous, allocated when None; otherwise as `workspace`.
        filters: False is the caller's word that top_ks, top_ps and min_ps keep all ids in every row: then they are not
            looked at, and one kernel that reads each logit once does it all.

    All one-dimensional tensors are contiguous. With tokens and both buffers given nothing is allocated and nothing
    syncs on a GPU (CUDA-graph safe).

    Returns:
        tokens, every element written.
    """
    assert logits.dim() == 2 and logits.stride(1) == 1, "logits must be [M, V] with a contiguous last dim"
    num_rows = logits.shape[0]
    tokens = logits.new_empty(num_rows, dtype=torch.int32) if tokens is None else tokens
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
    parameters = (seeds, positions, temperatures, top_ks, top_ps, min_ps)
    if use_triton(logits):
        from trtllm_tree.kernels.sampled_tokens.triton import launch

        launch(logits, *parameters, tokens, *row_buffers(logits, workspace, gathered), filters=filters)
    else:
        from trtllm_tree.kernels.sampled_tokens.reference import reference

        reference(logits, *parameters, tokens, filters=filters)
    return tokens
