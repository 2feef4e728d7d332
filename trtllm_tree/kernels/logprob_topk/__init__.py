"""Op `logprob_topk`: natural-log softmax of the k largest logits of each row.

Owns the contract, the workspace layout, the checks and the dispatch. It must not know what a
row is (a lane, a request).

Legend: R rows, V draft vocabulary, k children.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton

MAX_TOPK = 16
MAX_VOCAB = 1 << 18
# A row is read in tiles of TILE ids, each of them in groups of GROUP consecutive ids.
GROUP = 64
TILE = 4096


def workspace_shape(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """Shape of the float32 workspace.

    A row holds a counter of finished tiles (as int32), each group's maximum, then (max, sum of exp) of each tile. It
    must be zero when it is first used; the op leaves the counters zero.
    """
    return num_rows, 1 + -(-vocab_size // GROUP) + 2 * -(-vocab_size // TILE)


def logprob_topk(
    logits: torch.Tensor,
    k: int,
    *,
    d2t: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick each row's k largest logits and their log-probabilities, accumulated in float32.

    Order: logit descending, then id ascending, so exact ties go to the lower id wherever they lie in the row.
    A logit of -inf scores -inf. A row with a NaN or +inf has no log-probabilities: its scores are NaN and its
    ids still distinct and in range. With outputs and workspace given the kernels allocate nothing and never
    sync (CUDA-graph safe).

    Args:
        logits: float32, bfloat16 or float16 [R, V], V <= 2^18, last dim contiguous, rows may be strided.
        k: 1 .. min(16, V).
        d2t: int64 [V] offsets from draft to target ids (EAGLE3), or None to return draft ids.
        scores: float32 [R, k] output, allocated when None.
        ids: int32 [R, k] output: `id`, or `id + d2t[id]`; allocated when None.
        workspace: float32 of at least `workspace_shape(R, V)`, zero at first use; allocated when None. Calls that
            may overlap need one each. The reference ignores it.

    Returns:
        (scores, ids), every element written.

    Source: seed, section "The drafter scores, the tree selects".
    """
    num_rows, vocab_size = logits.shape
    scores = logits.new_empty((num_rows, k), dtype=torch.float32) if scores is None else scores
    ids = logits.new_empty((num_rows, k), dtype=torch.int32) if ids is None else ids
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), f"logits are {logits.dtype}"
    assert logits.stride(-1) == 1, "the last dim of logits must be contiguous"
    assert vocab_size <= MAX_VOCAB, f"at most {MAX_VOCAB} logits per row, got {vocab_size}"
    assert 1 <= k <= min(MAX_TOPK, vocab_size), f"k must be in 1..min({MAX_TOPK}, V), got {k}"
    assert scores.shape == ids.shape == (num_rows, k), "scores and ids must be [R, k]"
    assert scores.dtype == torch.float32 and ids.dtype == torch.int32, "scores must be float32 and ids int32"
    assert scores.stride(-1) == 1 or k == 1, "the last dim of scores must be contiguous"
    assert ids.stride(-1) == 1 or k == 1, "the last dim of ids must be contiguous"
    if d2t is not None:
        assert d2t.dtype == torch.int64 and d2t.shape == (vocab_size,), "d2t must be int64 [V]"
        assert d2t.is_contiguous(), "d2t must be contiguous"

    if use_triton(logits):
        from trtllm_tree.kernels.logprob_topk.triton import launch

        if workspace is None:
            workspace = logits.new_zeros(workspace_shape(num_rows, vocab_size), dtype=torch.float32)
        needed = workspace_shape(num_rows, vocab_size)
        assert workspace.dtype == torch.float32 and workspace.stride(-1) == 1, (
            "workspace must be float32 rows"
        )
        assert workspace.shape[0] >= needed[0] and workspace.shape[1] >= needed[1], (
            f"workspace is below {needed}"
        )
        launch(logits, d2t=d2t, scores=scores, ids=ids, workspace=workspace)
    else:
        from trtllm_tree.kernels.logprob_topk.reference import reference

        reference(logits, d2t=d2t, scores=scores, ids=ids)
    return scores, ids
