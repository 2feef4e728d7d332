"""Triton kernel of `logprob_topk`: one pass over the logits; a row's last program to finish picks the k best.

The pass keeps of each group of consecutive ids only the maximum. That is enough to find the top k: an element
outside the k best groups, ordered by (maximum descending, group ascending), is beaten by the maximum of each
of them, ties included since every id of a lower group is lower. The last program reads those k groups again.
It must not know what a row is.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import key_index, key_score, rank_key, tl, triton
from trtllm_tree.kernels.logprob_topk import GROUP, TILE


@triton.jit
def _finite_or_zero(value):
    """0 for -inf, so that -inf minus it stays -inf and its exp 0; anything else as it is."""
    return tl.where(value == float("-inf"), 0.0, value)


@triton.jit
def _pick(
    logits_ptr,
    d2t_ptr,
    workspace_ptr,
    scores_ptr,
    ids_ptr,
    vocab_size,
    num_groups,
    num_tiles,
    k,
    HAS_D2T: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The k best of one row, from what its tiles left in the workspace."""
    tile = tl.arange(0, BLOCK_T)
    tile_ptr = workspace_ptr + num_groups + 2 * tile
    # Other programs wrote these: past this SM's L1, where an older round's values may still lie.
    tile_max = tl.load(tile_ptr, mask=tile < num_tiles, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(tile_ptr + 1, mask=tile < num_tiles, other=0.0, cache_modifier=".cg")
    shift = _finite_or_zero(tl.max(tile_max, axis=0))
    log_total = shift + tl.log(tl.sum(total * tl.exp(tile_max - shift), axis=0))

    # Padding loses every tie by its index, and a group past the last one holds no id below vocab_size.
    group = tl.arange(0, BLOCK_G)
    group_max = tl.load(
        workspace_ptr + group, mask=group < num_groups, other=float("-inf"), cache_modifier=".cg"
    )
    best_group = key_index(tl.topk(rank_key(group_max, group), BLOCK_K))
    ids = best_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    keys = tl.reshape(rank_key(logits.to(tl.float32), ids), [BLOCK_K * GROUP])
    top = tl.topk(keys, BLOCK_K)

    r = tl.arange(0, BLOCK_K)
    best = key_index(top)
    logit = key_score(top)
    # A NaN total makes every score NaN. A row of nothing but -inf has the total -inf, and scores -inf.
    score = logit - _finite_or_zero(log_total)
    if HAS_D2T:
        best += tl.load(d2t_ptr + best, mask=r < k, other=0).to(tl.int32)
    tl.store(scores_ptr + r, score, mask=r < k)
    tl.store(ids_ptr + r, best, mask=r < k)


@triton.jit
def logprob_topk_kernel(
    logits_ptr,
    d2t_ptr,
    workspace_ptr,
    scores_ptr,
    ids_ptr,
    logits_stride_r,
    workspace_stride_r,
    scores_stride_r,
    ids_stride_r,
    vocab_size,
    num_groups,
    num_tiles,
    k,
    HAS_D2T: tl.constexpr,
    GROUPS_PER_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    counter_ptr = (workspace_ptr + row * workspace_stride_r).to(tl.pointer_type(tl.int32))
    workspace_ptr += row * workspace_stride_r + 1
    logits_ptr += row * logits_stride_r

    tile = tl.program_id(1)
    group = tile * GROUPS_PER_TILE + tl.arange(0, GROUPS_PER_TILE)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    # NaN must not win a maximum, but must reach the sum.
    group_max = tl.max(tl.where(logits == logits, logits, float("-inf")), axis=1)
    tile_max = tl.max(group_max, axis=0)
    total = tl.sum(tl.exp(logits - _finite_or_zero(tile_max)))
    tl.store(workspace_ptr + group, group_max, mask=group < num_groups)
    tl.store(workspace_ptr + num_groups + 2 * tile, tile_max)
    tl.store(workspace_ptr + num_groups + 2 * tile + 1, total)

    # Every thread's stores come before the count, and the last program's loads behind it.
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == num_tiles - 1:
        tl.debug_barrier()
        tl.store(counter_ptr, 0)
        _pick(
            logits_ptr,
            d2t_ptr,
            workspace_ptr,
            scores_ptr + row * scores_stride_r,
            ids_ptr + row * ids_stride_r,
            vocab_size,
            num_groups,
            num_tiles,
            k,
            HAS_D2T,
            GROUP,
            BLOCK_G,
            BLOCK_T,
            BLOCK_K,
        )


def _constexprs(vocab_size: int, k: int, *, has_d2t: bool) -> dict[str, object]:
    # tl.topk needs two elements at least.
    block_k = max(2, triton.next_power_of_2(k))
    return {
        "HAS_D2T": has_d2t,
        "GROUPS_PER_TILE": TILE // GROUP,
        "GROUP": GROUP,
        "BLOCK_G": max(block_k, triton.next_power_of_2(triton.cdiv(vocab_size, GROUP))),
        "BLOCK_T": triton.next_power_of_2(triton.cdiv(vocab_size, TILE)),
        "BLOCK_K": block_k,
    }


def _num_warps(vocab_size: int) -> int:
    return 4 if vocab_size <= 1 << 16 else 8


def launch(
    logits: torch.Tensor,
    *,
    d2t: torch.Tensor | None,
    scores: torch.Tensor,
    ids: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """Launch the kernel; arguments as in the op."""
    num_rows, vocab_size = logits.shape
    num_groups, num_tiles = triton.cdiv(vocab_size, GROUP), triton.cdiv(vocab_size, TILE)
    k = scores.shape[1]
    if num_rows == 0:
        return
    logprob_topk_kernel[(num_rows, num_tiles)](
        logits,
        d2t,
        workspace,
        scores,
        ids,
        logits.stride(0),
        workspace.stride(0),
        scores.stride(0),
        ids.stride(0),
        vocab_size,
        num_groups,
        num_tiles,
        k,
        **_constexprs(vocab_size, k, has_d2t=d2t is not None),
        num_warps=_num_warps(vocab_size),
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test: V = 32000 and 151936, k = 8."""
    types = {
        "logits_ptr": "*bf16:16",
        "workspace_ptr": "*fp32:16",
        "scores_ptr": "*fp32:16",
        "ids_ptr": "*i32:16",
        "d2t_ptr": "*i64:16",
        "logits_stride_r": "i32:16",
        "vocab_size": "i32:16",
    }
    names = [name for name in logprob_topk_kernel.arg_names if name.islower()]
    signature = {name: types.get(name, "i32") for name in names}
    return [
        (
            logprob_topk_kernel,
            signature,
            _constexprs(vocab_size, 8, has_d2t=has_d2t),
            {"num_warps": _num_warps(vocab_size)},
        )
        for vocab_size, has_d2t in ((32000, True), (151936, False))
    ]
