"""Triton kernel of `draft_tree_expand`: one program a request.

The lane arrays are replaced in place, so a program loads all of its request's old lanes before it stores any,
and no other program may look at them. It must not know how a drafter scores.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import key_index, key_score, rank_key, tl, triton

_NUM_WARPS = 8


# Specialising on the step's numbers would compile one kernel per step.
@triton.jit(do_not_specialize=["base", "first_slot", "window"])
def draft_tree_expand_kernel(
    scores_ptr,
    tokens_ptr,
    hidden_ptr,
    entry_scores_ptr,
    entry_tokens_ptr,
    entry_parents_ptr,
    lane_entries_ptr,
    lane_scores_ptr,
    lane_tokens_ptr,
    lane_mask_ptr,
    next_hidden_ptr,
    scores_stride_b,
    scores_stride_l,
    tokens_stride_b,
    tokens_stride_l,
    hidden_stride_b,
    hidden_stride_l,
    entry_scores_stride_b,
    entry_tokens_stride_b,
    entry_parents_stride_b,
    lane_entries_stride_b,
    lane_scores_stride_b,
    lane_tokens_stride_b,
    lane_mask_stride_b,
    lane_mask_stride_k,
    next_hidden_stride_b,
    next_hidden_stride_k,
    base,
    first_slot,
    window,
    words,
    hidden_size,
    IS_ROOT: tl.constexpr,
    TOPK: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    scores_ptr += b * scores_stride_b
    tokens_ptr += b * tokens_stride_b
    lane_mask_ptr += b * lane_mask_stride_b

    # Score and record every child.
    child = tl.arange(0, BLOCK_C)
    live = child < NUM_CHILDREN
    lane = child // TOPK
    score = tl.load(scores_ptr + lane * scores_stride_l + child % TOPK, mask=live, other=float("-inf"))
    token = tl.load(tokens_ptr + lane * tokens_stride_l + child % TOPK, mask=live, other=0)
    if IS_ROOT:
        lane_score = tl.zeros([BLOCK_C], tl.float32)
        lane_entry = tl.full([BLOCK_C], -1, tl.int32)
    else:
        lane_score = tl.load(lane_scores_ptr + b * lane_scores_stride_b + lane, mask=live, other=0.0)
        lane_entry = tl.load(lane_entries_ptr + b * lane_entries_stride_b + lane, mask=live, other=-1)
    # Not tl.minimum: it may drop the NaN.
    total = lane_score + tl.where(score > 0.0, 0.0, score)
    total = tl.where(total == total, total, float("-inf"))
    tl.store(entry_scores_ptr + b * entry_scores_stride_b + base + child, total, mask=live)
    tl.store(entry_tokens_ptr + b * entry_tokens_stride_b + base + child, token, mask=live)
    tl.store(entry_parents_ptr + b * entry_parents_stride_b + base + child, lane_entry, mask=live)

    # Padding scores -inf at the highest indices, so it ranks behind every child.
    top = tl.topk(rank_key(total, child), BLOCK_K)
    r = tl.arange(0, BLOCK_K)
    is_lane = r < TOPK
    best = tl.where(is_lane, key_index(top), 0)
    parent = best // TOPK

    # The new lanes. Only the masks are still to be read from the old ones.
    w = tl.arange(0, BLOCK_W)
    mask_live = is_lane[:, None] & (w < words)[None, :]
    slot = first_slot + r
    bit = tl.where(slot < window, tl.full([BLOCK_K], 1, tl.int64) << (slot % 64).to(tl.int64), 0)
    mask = tl.where(w[None, :] == (slot // 64)[:, None], bit[:, None], 0)
    if not IS_ROOT:
        mask |= tl.load(
            lane_mask_ptr + (parent * lane_mask_stride_k)[:, None] + w[None, :], mask=mask_live, other=0
        )
    best_token = tl.load(tokens_ptr + parent * tokens_stride_l + best % TOPK, mask=is_lane, other=0)
    tl.debug_barrier()
    tl.store(lane_mask_ptr + (r * lane_mask_stride_k)[:, None] + w[None, :], mask, mask=mask_live)
    tl.store(lane_entries_ptr + b * lane_entries_stride_b + r, base + best, mask=is_lane)
    tl.store(lane_scores_ptr + b * lane_scores_stride_b + r, key_score(top), mask=is_lane)
    tl.store(lane_tokens_ptr + b * lane_tokens_stride_b + r, best_token, mask=is_lane)

    source = hidden_ptr + b * hidden_stride_b + (parent.to(tl.int64) * hidden_stride_l)[:, None]
    target = next_hidden_ptr + b * next_hidden_stride_b + (r.to(tl.int64) * next_hidden_stride_k)[:, None]
    for start in range(0, hidden_size, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        row_live = is_lane[:, None] & (h < hidden_size)[None, :]
        row = tl.load(source + h[None, :], mask=row_live, other=0.0)
        tl.store(target + h[None, :], row, mask=row_live)


def _constexprs(
    num_lanes: int, topk: int, words: int, hidden_size: int, *, is_root: bool
) -> dict[str, object]:
    # tl.topk needs two elements at least.
    block_k = max(2, triton.next_power_of_2(topk))
    return {
        "IS_ROOT": is_root,
        "TOPK": topk,
        "NUM_CHILDREN": num_lanes * topk,
        "BLOCK_C": max(block_k, triton.next_power_of_2(num_lanes * topk)),
        "BLOCK_K": block_k,
        "BLOCK_W": triton.next_power_of_2(words),
        # 8192 elements in flight hide the latency of a lone program's copy.
        "BLOCK_H": min(triton.next_power_of_2(hidden_size), 8192 // block_k),
    }


def launch(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    *,
    step: int,
    base: int,
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
    """Launch the kernel; arguments as in the op, `base` is the first entry id of the step."""
    num_requests, num_lanes, topk = scores.shape
    words, hidden_size = lane_mask.shape[-1], hidden.shape[-1]
    if num_requests == 0:
        return
    tensors = (scores, tokens, hidden, entry_scores, entry_tokens, entry_parents)
    tensors += (lane_entries, lane_scores, lane_tokens, lane_mask, next_hidden)
    draft_tree_expand_kernel[(num_requests,)](
        *tensors,
        *(stride for tensor in tensors for stride in tensor.stride()[:-1]),
        base,
        step * topk,
        window,
        words,
        hidden_size,
        **_constexprs(num_lanes, topk, words, hidden_size, is_root=step == 0),
        num_warps=_NUM_WARPS,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test: K = 8 and 16, bf16 hidden rows of 4096."""
    signature = dict.fromkeys((name for name in draft_tree_expand_kernel.arg_names if name.islower()), "i32")
    signature |= {name: "*i32:16" for name in signature if name.endswith("_ptr")}
    signature |= dict.fromkeys(("scores_ptr", "entry_scores_ptr", "lane_scores_ptr"), "*fp32:16")
    signature |= dict.fromkeys(("hidden_ptr", "next_hidden_ptr"), "*bf16:16") | {"lane_mask_ptr": "*i64:16"}
    hidden_strides = [name for name in signature if "hidden_stride" in name]
    signature |= dict.fromkeys(("hidden_size", *hidden_strides), "i32:16")
    return [
        (
            draft_tree_expand_kernel,
            signature,
            _constexprs(1 if is_root else topk, topk, -(-9 * topk // 64), 4096, is_root=is_root),
            {"num_warps": _NUM_WARPS},
        )
        for topk, is_root in ((8, True), (8, False), (16, False))
    ]
