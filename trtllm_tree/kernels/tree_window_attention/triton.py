"""Triton kernel of `tree_window_attention`: one launch for the prefix tail, the masked window and the merge.

Rows of one KV head are folded (m = r * group + g) so that each key is read once per tile. It must not
know what the rows are; `tiles` alone chooses tiles.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from trtllm_tree.kernels._triton import INTERPRET, dot_dtype, tl, triton
from trtllm_tree.kernels.tree_window_attention.keys import load_block, page_at
from trtllm_tree.kernels.tree_window_attention.tiles import Tile, choose_tile, key_blocks
from trtllm_tree.kernels.tree_window_attention.visibility import (
    mask_word,
    row_bits,
    visible_columns,
    window_reach,
)

_LOG2_E = 1.4426950408889634
_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _softmax_step(scores, visible, row_max, scale_log2):
    """Weights of one more block, the new maximum, and what the old sums are to be multiplied by."""
    scores = tl.where(visible, scores, float("-inf"))
    # The scale is positive, so it may wait until behind the maximum.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # A row that has seen nothing yet keeps the max -inf, and -inf - -inf is NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    rescale = tl.exp2(row_max - base)
    return weights, new_max, rescale


@triton.jit
def tree_window_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    prefix_lens_ptr,
    mask_ptr,
    prefix_out_ptr,
    prefix_lse2_ptr,
    sinks_ptr,
    out_ptr,
    scale_log2,
    num_rows,
    num_kv_heads,
    window,
    max_pages,
    q_stride_b,
    q_stride_r,
    q_stride_h,
    k_stride_page,
    k_stride_head,
    k_stride_token,
    v_stride_page,
    v_stride_head,
    v_stride_token,
    page_table_stride_b,
    mask_stride_b,
    mask_stride_r,
    prefix_out_stride_b,
    prefix_out_stride_r,
    prefix_out_stride_h,
    prefix_lse2_stride_b,
    prefix_lse2_stride_r,
    out_stride_b,
    out_stride_r,
    out_stride_h,
    CAUSAL_PREFIX: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    REACH_WORDS: tl.constexpr,
    REST_N: tl.constexpr,
    ALIGN: tl.constexpr,
    LATE_PREFIX: tl.constexpr,
    EARLY_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PER_REGISTER: tl.constexpr,
    DOT: tl.constexpr,
):
    first_m = tl.program_id(0) * BLOCK_M
    b = (tl.program_id(1) // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % num_kv_heads).to(tl.int64)
    m = first_m + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = m // GROUP
    row64 = row.to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    row_valid = row < num_rows
    row_mask = row_valid[:, None] & (d < HEAD_DIM)[None, :]
    page_table_ptr += b * page_table_stride_b
    mask_ptr += b * mask_stride_b + row64 * mask_stride_r

    # Everything is loaded before anything is computed, what others wait for first: at these sizes the kernel is a
    # chain of memory latencies, and no load moves up past a reduction over the tile's rows.
    prefix_len = tl.load(prefix_lens_ptr + b)
    tail_len = 0
    if CAUSAL_PREFIX:
        # Not cut at the prefix's length, which is still being loaded: columns before the prefix are not seen.
        tail_len = num_rows - 1 - first_m // GROUP
    first_column = -tl.cdiv(tail_len, ALIGN) * ALIGN
    column = first_column + tl.arange(0, BLOCK_N)
    low_word = mask_word(mask_ptr, first_column, window, row_valid)
    high_word = low_word
    if BLOCK_N > 32:
        high_word = mask_word(mask_ptr, first_column + 32, window, row_valid)
    q_ptr += b * q_stride_b + kv_head * GROUP * q_stride_h
    q_offset = row * q_stride_r + m % GROUP * q_stride_h
    q = tl.load(q_ptr + (q_offset[:, None] + d[None, :]), mask=row_mask, other=0.0).to(DOT)
    position = prefix_len + column
    page = page_at(page_table_ptr, max_pages, position, (position >= 0) & (column < window), PAGE_SIZE)
    covered = prefix_len + row * 0
    if CAUSAL_PREFIX:
        covered = prefix_len - num_rows + 1 + row
    has_partial = row_valid & (covered > 0)
    lse2_offset = b * prefix_lse2_stride_b + row64 * prefix_lse2_stride_r + head
    lse2 = tl.load(prefix_lse2_ptr + lse2_offset, mask=has_partial, other=float("-inf"))
    prefix_out_ptr += b * prefix_out_stride_b + kv_head * GROUP * prefix_out_stride_h
    prefix_offset = row * prefix_out_stride_r + m % GROUP * prefix_out_stride_h
    prefix_ptrs = prefix_out_ptr + (prefix_offset[:, None] + d[None, :])
    prefix = tl.zeros((BLOCK_M, BLOCK_D), prefix_out_ptr.dtype.element_ty)
    if not LATE_PREFIX:
        prefix = tl.load(prefix_ptrs, mask=has_partial[:, None] & row_mask, other=0.0)

    # Columns count from the window's start; the tail has negative ones.
    tail_start = tl.maximum(covered, 0) - prefix_len
    k_ptr += kv_head * k_stride_head
    v_ptr += kv_head * v_stride_head
    low = row_bits(low_word, first_column, window, tail_start, ALIGN)
    high = low
    if BLOCK_N > 32:
        high = row_bits(high_word, first_column + 32, window, tail_start, ALIGN)
    visible, seen = visible_columns(low, high, BLOCK_N)
    keys, values = load_block(
        k_ptr,
        v_ptr,
        page,
        position % PAGE_SIZE,
        seen,
        k_stride_page,
        k_stride_token,
        v_stride_page,
        v_stride_token,
        HEAD_DIM,
        BLOCK_D,
        PER_REGISTER,
    )
    # The partial is the online softmax's first term: its max is lse2, its sum 1. Its output joins at the end.
    row_max = lse2
    row_sum = tl.where(has_partial, 1.0, 0.0)
    if HAS_SINKS:
        # One more term of the sum, with no value.
        sink = tl.load(sinks_ptr + head, mask=row_valid, other=0.0) * 1.4426950408889634
        row_max = tl.maximum(lse2, sink)
        row_sum = row_sum * tl.exp2(lse2 - row_max) + tl.exp2(sink - row_max)
    # The first block needs no accumulator yet, so it may be the largest.
    scores = tl.dot(q, tl.trans(keys.to(DOT)), input_precision="ieee")
    if REST_N == 0 and LATE_PREFIX:
        prefix = tl.load(prefix_ptrs, mask=has_partial[:, None] & row_mask, other=0.0)
    weights, row_max, rescale = _softmax_step(scores, visible, row_max, scale_log2)
    if EARLY_NORM:
        # Fewer weights to normalise than outputs.
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        weights = weights * (1.0 / tl.where(row_sum > 0.0, row_sum, 1.0))[:, None]
        acc = tl.dot(weights.to(DOT), values.to(DOT), input_precision="ieee")
    else:
        # The sum over the row crosses warps; nothing waits for it yet.
        acc = tl.dot(weights.to(DOT), values.to(DOT), input_precision="ieee")
        row_sum = row_sum * rescale + tl.sum(weights, 1)
    if REST_N > 0:
        end = window_reach(mask_ptr, row_valid, window, REACH_WORDS)
        for start in tl.range(first_column + BLOCK_N, end, REST_N):
            # Names of their own: a loop's variables keep their shapes.
            rest_column = start + tl.arange(0, REST_N)
            rest_position = prefix_len + rest_column
            in_reach = (rest_position >= 0) & (rest_column < end)
            rest_page = page_at(page_table_ptr, max_pages, rest_position, in_reach, PAGE_SIZE)
            rest_word = mask_word(mask_ptr, start, window, row_valid)
            rest_bits = row_bits(rest_word, start, window, tail_start, ALIGN)
            rest_visible, rest_seen = visible_columns(rest_bits, rest_bits, REST_N)
            rest_keys, rest_values = load_block(
                k_ptr,
                v_ptr,
                rest_page,
                rest_position % PAGE_SIZE,
                rest_seen,
                k_stride_page,
                k_stride_token,
                v_stride_page,
                v_stride_token,
                HEAD_DIM,
                BLOCK_D,
                PER_REGISTER,
            )
            rest_scores = tl.dot(q, tl.trans(rest_keys.to(DOT)), input_precision="ieee")
            rest_weights, row_max, rescale = _softmax_step(rest_scores, rest_visible, row_max, scale_log2)
            row_sum = row_sum * rescale + tl.sum(rest_weights, 1)
            acc = tl.dot(
                rest_weights.to(DOT), rest_values.to(DOT), acc * rescale[:, None], input_precision="ieee"
            )

    if LATE_PREFIX and REST_N > 0:
        prefix = tl.load(prefix_ptrs, mask=has_partial[:, None] & row_mask, other=0.0)
    norm = 1.0 / tl.where(row_sum > 0.0, row_sum, 1.0)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    share = tl.exp2(lse2 - base) * norm
    if not EARLY_NORM:
        acc = acc * norm[:, None]
    acc += prefix.to(tl.float32) * share[:, None]
    out_ptr += b * out_stride_b + kv_head * GROUP * out_stride_h
    out_offset = row * out_stride_r + m % GROUP * out_stride_h
    tl.store(out_ptr + (out_offset[:, None] + d[None, :]), acc.to(out_ptr.dtype.element_ty), mask=row_mask)


def _per_register(itemsize: int) -> int:
    """Elements of a cache that one register holds; 0 under the interpreter, which knows no registers."""
    return 0 if INTERPRET else 4 // itemsize


def _constexprs(tile: Tile, num_rows: int, window: int, *, causal_prefix: bool) -> dict[str, object]:
    """How the keys are gone through: in one block if they fit, else up to the last key that is seen."""
    block_n, rest_n = key_blocks(num_rows, window, causal_prefix=causal_prefix)
    return {
        "CAUSAL_PREFIX": causal_prefix,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": block_n,
        "REST_N": rest_n,
        "ALIGN": 16 if rest_n == 16 else 32,
        "REACH_WORDS": triton.cdiv(window, 64) if rest_n else 0,
        # Registers, or latency where there are enough of them.
        "LATE_PREFIX": tile.block_m >= 64,
        "EARLY_NORM": rest_n == 0 and tile.block_m >= 64,
    }


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse2: torch.Tensor,
    *,
    window: int,
    causal_prefix: bool,
    scale: float,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    block_m: int | None = None,
) -> None:
    """Launch the kernel; arguments as in the op, `block_m` overrides `choose_tile` (tests, benchmarks)."""
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    _, rest_n = key_blocks(num_rows, window, causal_prefix=causal_prefix)
    tile = choose_tile(batch, num_rows * group, head_dim, q.dtype, rest_n=rest_n)
    if block_m is not None:
        tile = replace(tile, block_m=block_m)
    tree_window_attention_kernel[(triton.cdiv(num_rows * group, tile.block_m), batch * num_kv_heads)](
        q,
        k_cache,
        v_cache,
        page_table,
        prefix_lens,
        mask,
        prefix_out,
        prefix_lse2,
        sinks,
        out,
        scale * _LOG2_E,
        num_rows,
        num_kv_heads,
        window,
        page_table.shape[1],
        *q.stride()[:3],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        page_table.stride(0),
        *mask.stride()[:2],
        *prefix_out.stride()[:3],
        *prefix_lse2.stride()[:2],
        *out.stride()[:3],
        HAS_SINKS=sinks is not None,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_cache.shape[2],
        BLOCK_D=triton.next_power_of_2(head_dim),
        PER_REGISTER=_per_register(k_cache.element_size()),
        DOT=dot_dtype(_TL_DTYPES[q.dtype]),
        **_constexprs(tile, num_rows, window, causal_prefix=causal_prefix),
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
        # The loads are in the order that hides them.
        num_stages=1,
    )


# Strides of tensors with rows of head_dim elements, which is a multiple of 16.
_ROW_STRIDES = ("q_stride", "k_stride", "v_stride", "prefix_out_stride", "out_stride")
_AOT_CASES = (
    # (query, cache, folded rows, HEAD_DIM, window, causal_prefix, sinks)
    ("bf16", "bf16", 128, 128, 64, True, False),
    ("bf16", "bf16", 64, 128, 64, False, False),
    ("bf16", "bf16", 64, 128, 32, True, False),
    ("bf16", "bf16", 64, 128, 32, False, False),
    ("bf16", "bf16", 64, 128, 32, False, True),
    ("bf16", "bf16", 16, 80, 100, False, False),
    ("bf16", "fp8e4nv", 64, 128, 32, True, False),
    ("fp16", "fp16", 64, 256, 32, True, False),
    ("fp32", "fp32", 16, 128, 32, True, False),
)


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    specs = []
    for query, cache, folded, head_dim, window, causal, sinks in _AOT_CASES:
        signature = dict.fromkeys(
            (name for name in tree_window_attention_kernel.arg_names if name.islower()), "i32"
        )
        signature |= {name: "i32:16" for name in signature if name.startswith(_ROW_STRIDES)}
        signature |= dict.fromkeys(("q_ptr", "prefix_out_ptr", "out_ptr"), f"*{query}:16")
        signature |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{cache}:16")
        signature |= dict.fromkeys(("page_table_ptr", "prefix_lens_ptr"), "*i32:16")
        signature |= dict.fromkeys(("prefix_lse2_ptr", "sinks_ptr"), "*fp32:16")
        signature |= {"mask_ptr": "*i64:16", "scale_log2": "fp32"}
        _, rest_n = key_blocks(window, window, causal_prefix=causal)
        tile = choose_tile(8 if folded > 16 else 1, folded, head_dim, names[query], rest_n=rest_n)
        constexprs = {
            **({} if sinks else {"sinks_ptr": None}),
            "HAS_SINKS": sinks,
            "GROUP": 4,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": 32,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "PER_REGISTER": _per_register({"fp8e4nv": 1, "fp32": 4}.get(cache, 2)),
            "DOT": dot_dtype(_TL_DTYPES[names[query]]),
            **_constexprs(tile, window, window, causal_prefix=causal),
        }
        options = {"num_warps": tile.num_warps, "num_stages": 1, "maxnreg": tile.max_registers}
        # Full-precision products are multiply-adds, unrolled; nobody waits for them.
        options["spill_bytes"] = 160 if query == "fp32" else 128 if tile.max_registers else 0
        specs.append((tree_window_attention_kernel, signature, constexprs, options))
    return specs
