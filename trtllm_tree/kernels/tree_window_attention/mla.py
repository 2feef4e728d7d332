"""Triton kernel of `tree_window_attention` over a latent cache (MLA): tail, masked window and merge in one launch.

All heads share one latent row a token, so rows are folded as m = r * num_heads + h. A latent row is read once: its
leading channels are the key's latent part and the value. Tile sizes are chosen in `choose_tile` alone.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import bit_or, dot_dtype, tl, triton
from trtllm_tree.kernels.tree_window_attention.visibility import window_reach

_LOG2_E = 1.4426950408889634
_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Divides 64, so that a block's columns share a mask word.
_BLOCK_N = 32


@triton.jit
def _load_block(
    latent_ptr,
    page_table_ptr,
    mask_ptr,
    start,
    end,
    row_valid,
    tail_start,
    tail_len,
    prefix_len,
    max_pages,
    latent_stride_page,
    latent_stride_token,
    CAUSAL_PREFIX: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """(latent, rope, visible) of the columns from `start`. A slot that no row of the tile sees is not read."""
    column = start + tl.arange(0, BLOCK_N)
    first = tl.maximum(start, 0)
    # As a vector: newer interpreters take `vector & scalar` for an integer.
    has_columns = mask_ptr.to(tl.int64) * 0 + start < end
    word = tl.load(mask_ptr + first // 64, mask=row_valid & has_columns, other=0)
    # Halves of the word, since 64-bit shifts of a tile cost registers.
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    bit = column - first // 64 * 64
    in_window = (column >= 0) & (column < end)
    half = tl.where((bit < 32)[None, :], low[:, None], high[:, None])
    visible = (((half >> (bit & 31)[None, :]) & 1) != 0) & in_window[None, :]
    seen = (((tl.reduce(word, 0, bit_or) >> tl.maximum(bit, 0)) & 1) != 0) & in_window
    if CAUSAL_PREFIX:
        visible = visible | ((column[None, :] >= tail_start[:, None]) & (column < 0)[None, :])
        seen = seen | ((column >= -tail_len) & (column < 0))

    position = prefix_len + column
    index = position // PAGE_SIZE
    in_reach = (column >= -tail_len) & (column < end)
    # The table does not wait for the mask.
    page = tl.load(page_table_ptr + index, mask=in_reach & (index < max_pages), other=0)
    offset = (position % PAGE_SIZE).to(tl.int64) * latent_stride_token
    row_ptr = (latent_ptr + tl.maximum(page, 0).to(tl.int64) * latent_stride_page + offset)[:, None]
    d = tl.arange(0, BLOCK_DV)[None, :]
    latent = tl.load(row_ptr + d, mask=seen[:, None] & (d < VALUE_DIM), other=0.0)
    rope = latent
    if ROPE_DIM > 0:
        d = tl.arange(0, BLOCK_ROPE)[None, :]
        rope = tl.load(row_ptr + VALUE_DIM + d, mask=seen[:, None] & (d < ROPE_DIM), other=0.0)
    return latent, rope, visible


@triton.jit
def tree_window_attention_mla_kernel(
    q_ptr,
    latent_ptr,
    page_table_ptr,
    prefix_lens_ptr,
    mask_ptr,
    prefix_out_ptr,
    prefix_lse2_ptr,
    out_ptr,
    scale_log2,
    num_rows,
    window,
    max_pages,
    q_stride_b,
    q_stride_r,
    q_stride_h,
    latent_stride_page,
    latent_stride_token,
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
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGN: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The output of BLOCK_M folded rows of one request."""
    first_m = tl.program_id(0) * BLOCK_M
    b = tl.program_id(1).to(tl.int64)
    m = first_m + tl.arange(0, BLOCK_M)
    row = m // NUM_HEADS
    row64 = row.to(tl.int64)
    head = m % NUM_HEADS
    row_valid = row < num_rows
    d = tl.arange(0, BLOCK_DV)[None, :]
    value_mask = row_valid[:, None] & (d < VALUE_DIM)
    page_table_ptr += b * page_table_stride_b
    mask_ptr += b * mask_stride_b + row64 * mask_stride_r

    # Everything is loaded before anything is computed: at these sizes the kernel is a chain of memory latencies.
    prefix_len = tl.load(prefix_lens_ptr + b)
    if CAUSAL_PREFIX:
        covered = prefix_len - num_rows + 1 + row
        tail_len = tl.minimum(prefix_len, num_rows - 1 - first_m // NUM_HEADS)
    else:
        covered = prefix_len + row * 0
        tail_len = 0
    has_partial = row_valid & (covered > 0)
    lse2_offset = b * prefix_lse2_stride_b + row64 * prefix_lse2_stride_r + head
    lse2 = tl.load(prefix_lse2_ptr + lse2_offset, mask=has_partial, other=float("-inf"))
    q_row = (q_ptr + b * q_stride_b + row64 * q_stride_r + head * q_stride_h)[:, None]
    q = tl.load(q_row + d, mask=value_mask, other=0.0).to(DOT)
    if ROPE_DIM > 0:
        rope_d = tl.arange(0, BLOCK_ROPE)[None, :]
        rope_mask = row_valid[:, None] & (rope_d < ROPE_DIM)
        q_rope = tl.load(q_row + VALUE_DIM + rope_d, mask=rope_mask, other=0.0).to(DOT)
    prefix_offset = b * prefix_out_stride_b + row64 * prefix_out_stride_r + head * prefix_out_stride_h
    prefix_mask = has_partial[:, None] & value_mask
    prefix = tl.load(prefix_out_ptr + prefix_offset[:, None] + d, mask=prefix_mask, other=0.0)

    # Columns count from the window's start; the tail has negative ones.
    tail_start = tl.maximum(covered, 0) - prefix_len
    first_column = -tl.cdiv(tail_len, ALIGN) * ALIGN
    end = window
    if not ONE_BLOCK:
        end = window_reach(mask_ptr, row_valid, window, WORDS)
    # The partial is the online softmax's first term: its max is lse2, its sum 1, its output the accumulator.
    row_max = lse2
    row_sum = tl.where(has_partial, 1.0, 0.0)
    acc = prefix.to(tl.float32)
    for i in tl.range(0, 1 if ONE_BLOCK else tl.cdiv(end - first_column, BLOCK_N)):
        latent, rope, visible = _load_block(
            latent_ptr,
            page_table_ptr,
            mask_ptr,
            first_column + i * BLOCK_N,
            end,
            row_valid,
            tail_start,
            tail_len,
            prefix_len,
            max_pages,
            latent_stride_page,
            latent_stride_token,
            CAUSAL_PREFIX,
            VALUE_DIM,
            ROPE_DIM,
            PAGE_SIZE,
            BLOCK_N,
            BLOCK_DV,
            BLOCK_ROPE,
        )
        keys = latent.to(DOT)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if ROPE_DIM > 0:
            scores = tl.dot(q_rope, tl.trans(rope.to(DOT)), scores, input_precision="ieee")
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing yet keeps the max -inf, and -inf - -inf is NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DOT), keys, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max

    acc = acc * (1.0 / tl.where(row_sum > 0.0, row_sum, 1.0))[:, None]
    out_offset = b * out_stride_b + row64 * out_stride_r + head * out_stride_h
    tl.store(out_ptr + out_offset[:, None] + d, acc.to(out_ptr.dtype.element_ty), mask=value_mask)


def choose_tile(batch: int, folded_rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """(BLOCK_M, num_warps): small tiles fill the GPU at small batch, large ones re-read fewer latent rows.

    A row of 512 channels is most of what registers hold. Measured on an H200 at B 32, 32 nodes, 128 heads, causal:
    32 rows with 4 warps 192 us, with 8 warps 274; 16 rows 240 and 366; 64 rows 313. At B 1: 16 rows with 4 warps 10.2.
    """
    is_large = batch * folded_rows >= 16384 and dtype != torch.float32
    return 32 if is_large else 16, 4


def _blocks(num_rows: int, window: int, causal_prefix: bool) -> dict[str, object]:
    """How the window is gone through: in one block, or in several up to the last key that is seen."""
    return {
        "WORDS": triton.cdiv(window, 64),
        # Blocks of a one-word mask may start anywhere. Then tail and window of a tree's row j, which is followed
        # by R - 1 - j tail keys and sees no column behind j, need no block between them.
        "ALIGN": 1 if window <= 64 else _BLOCK_N,
        "ONE_BLOCK": window <= _BLOCK_N - (num_rows - 1 if causal_prefix else 0),
        "BLOCK_N": _BLOCK_N,
    }


def _channels(value_dim: int, rope_dim: int) -> dict[str, int]:
    """Channel counts and their tiles, which a matrix unit wants no smaller than 16."""
    return {
        "VALUE_DIM": value_dim,
        "ROPE_DIM": rope_dim,
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
        "BLOCK_ROPE": max(16, triton.next_power_of_2(rope_dim)),
    }


def launch(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    v_cache: None,
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
    tile: tuple[int, int] | None = None,
) -> None:
    """Launch the kernel; arguments as in the op, `tile` overrides `choose_tile` (tests, benchmarks)."""
    batch, num_rows, num_heads, query_dim = q.shape
    value_dim = out.shape[3]
    blocks = _blocks(num_rows, window, causal_prefix)
    folded_rows = num_rows * num_heads
    block_m, num_warps = tile or choose_tile(batch, folded_rows, q.dtype)
    tree_window_attention_mla_kernel[(triton.cdiv(folded_rows, block_m), batch)](
        q,
        latent_cache,
        page_table,
        prefix_lens,
        mask,
        prefix_out,
        prefix_lse2,
        out,
        scale * _LOG2_E,
        num_rows,
        window,
        page_table.shape[1],
        *q.stride()[:3],
        latent_cache.stride(0),
        latent_cache.stride(2),
        page_table.stride(0),
        *mask.stride()[:2],
        *prefix_out.stride()[:3],
        *prefix_lse2.stride()[:2],
        *out.stride()[:3],
        CAUSAL_PREFIX=causal_prefix,
        NUM_HEADS=num_heads,
        PAGE_SIZE=latent_cache.shape[2],
        **_channels(value_dim, query_dim - value_dim),
        **blocks,
        BLOCK_M=block_m,
        DOT=dot_dtype(_TL_DTYPES[q.dtype]),
        num_warps=num_warps,
        num_stages=1,
    )


# Strides of tensors with rows of Dqk or Dv elements, which are multiples of 16.
_ROW_STRIDES = ("q_stride", "latent_stride", "prefix_out_stride", "out_stride")
_AOT_CASES = (
    # (query, cache, partial, batch, rows, VALUE_DIM, ROPE_DIM, causal_prefix, tile or None)
    ("bf16", "bf16", "bf16", 1, 16, 512, 64, False, None),
    ("bf16", "bf16", "bf16", 1, 16, 512, 64, True, None),
    ("bf16", "bf16", "bf16", 32, 32, 512, 64, False, None),
    ("bf16", "bf16", "bf16", 32, 32, 512, 64, False, (64, 8)),
    ("bf16", "bf16", "bf16", 32, 64, 512, 64, True, None),
    ("bf16", "bf16", "bf16", 32, 100, 512, 64, True, None),
    ("bf16", "fp8e4nv", "bf16", 1, 16, 512, 64, False, None),
    ("bf16", "fp8e4nv", "bf16", 32, 32, 512, 64, False, None),
    ("bf16", "fp8e4nv", "bf16", 32, 32, 512, 64, True, None),
    ("fp16", "fp16", "fp32", 32, 32, 512, 64, True, None),
    ("bf16", "bf16", "bf16", 1, 16, 256, 0, True, None),
    ("fp32", "fp32", "fp32", 1, 16, 64, 16, True, None),
)


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    num_heads = 128
    specs = []
    for query, cache, partial, batch, rows, value_dim, rope_dim, causal, tile in _AOT_CASES:
        signature = dict.fromkeys(
            (name for name in tree_window_attention_mla_kernel.arg_names if name.islower()), "i32"
        )
        signature |= {name: "i32:16" for name in signature if name.startswith(_ROW_STRIDES)}
        signature |= dict.fromkeys(("q_ptr", "out_ptr"), f"*{query}:16")
        signature |= {"prefix_out_ptr": f"*{partial}:16", "latent_ptr": f"*{cache}:16"}
        signature |= dict.fromkeys(("page_table_ptr", "prefix_lens_ptr"), "*i32:16")
        signature |= {"mask_ptr": "*i64:16", "prefix_lse2_ptr": "*fp32:16", "scale_log2": "fp32"}
        blocks = _blocks(rows, rows, causal)
        block_m, num_warps = tile or choose_tile(batch, rows * num_heads, names[query])
        constexprs = {
            "CAUSAL_PREFIX": causal,
            "NUM_HEADS": num_heads,
            "PAGE_SIZE": 64,
            **_channels(value_dim, rope_dim),
            **blocks,
            "BLOCK_M": block_m,
            "DOT": dot_dtype(_TL_DTYPES[names[query]]),
        }
        # 32 rows spill behind a loop; they were measured with that.
        options = {"num_warps": num_warps, "num_stages": 1, "spill_bytes": 192 if block_m == 32 else 0}
        specs.append((tree_window_attention_mla_kernel, signature, constexprs, options))
    return specs
