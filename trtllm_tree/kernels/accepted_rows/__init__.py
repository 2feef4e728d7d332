"""Op `accepted_rows`: what drafting reads of an accepted window, in one launch.

Owns the contract and the dispatch. It must not know how rows were accepted, nor what the draft model does.

Legend: B requests, N rows of the window, W rows of draft step 0, S draft steps, L rows of all lanes of a round.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.accepted_rows.lane_rows import LaneRows
from trtllm_tree.kernels.dispatch import use_triton


def accepted_rows(
    predict: torch.Tensor,
    accept_len: torch.Tensor,
    committed_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    last_rows: torch.Tensor,
    roots: torch.Tensor,
    frontier: torch.Tensor,
    lanes: LaneRows | None = None,
) -> None:
    """Step 0's tokens, the row to go on from, the next root, the accepted length, and where the lanes stand.

    Args:
        predict: int32 [B, N], kept target tokens packed to the front, -1 behind them or for a row of NaN.
        accept_len: int32 [B], 1 .. N. May exceed W: the dummy tokens of a pad row are a chain of N.
        committed_lens: int32 [B].
        tokens: int32 [B, W] output, W <= N: `predict` with 0 for what is no token.
        last_rows: int64 [B] output: b * W + min(accept_len, W) - 1, the last accepted row of [B, W] rows.
        roots: int32 [B] output: the last kept token, 0 if it is none.
        frontier: int32 [B] output: committed_lens + accept_len.
        lanes: outputs of a tree's lanes; a chain has none.

    Every element of the outputs is written. Allocates nothing and never syncs on a GPU. Source: seed, "The tree is a
    parameter of the chain path" and "Draft lanes write the draft cache like any draft step".
    """
    batch, width = tokens.shape
    assert predict.shape[0] == batch and width <= predict.shape[1], "tokens must be [B, W] with W <= N"
    for name, tensor in (("predict", predict), ("tokens", tokens)):
        assert tensor.dtype == torch.int32 and tensor.stride(1) == 1, f"{name} must be int32 rows"
    vectors = (accept_len, committed_lens, last_rows, roots, frontier)
    assert all(v.shape == (batch,) and v.is_contiguous() for v in vectors), "vectors must be contiguous [B]"
    assert last_rows.dtype == torch.int64, "last_rows must be int64"
    assert all(v.dtype == torch.int32 for v in (accept_len, committed_lens, roots, frontier)), (
        "int32 expected"
    )
    if lanes is not None:
        lanes.check(batch)
    if use_triton(predict):
        from trtllm_tree.kernels.accepted_rows.triton import launch as run
    else:
        from trtllm_tree.kernels.accepted_rows.reference import reference as run
    run(
        predict,
        accept_len,
        committed_lens,
        tokens=tokens,
        last_rows=last_rows,
        roots=roots,
        frontier=frontier,
        lanes=lanes,
    )


__all__ = ["LaneRows", "accepted_rows"]
