"""Triton kernel of `tree_window_attention`: one launch for the prefix tail, the masked window and the merge.

Rows of one KV head are folded (m = r * group + g) so that each key is read once per tile. It must not
know what the rows are; tile sizes are chosen in `choose_tile` alone.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import dot_dtype, tl, triton

# Blocks start at multiples of BLOCK_N and BLOCK_N divides 32, so the mask bits of a block lie in one word.
BLOCK_N = 32
_LOG2_E = 1.4426950408889634
_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _bit_or(a, b):
    return a | b


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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
):
    first_m = tl.program_id(0) * BLOCK_M
    b = (tl.program_id(1) // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % num_kv_heads).to(tl.int64)
    m = first_m + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    row = m // GROUP
    row64 = row.to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    row_valid = row < num_rows
    in_head = (d < HEAD_DIM)[None, :]

    q_offset = b * q_stride_b + row64 * q_stride_r + head * q_stride_h
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=row_valid[:, None] & in_head, other=0.0).to(DOT)

    prefix_len = tl.load(prefix_lens_ptr + b)
    if CAUSAL_PREFIX:
        covered = prefix_len - num_rows + 1 + row
        tail_len = tl.minimum(prefix_len, num_rows - 1 - first_m // GROUP)
    else:
        covered = prefix_len + row * 0
        tail_len = 0

    # The online softmax starts from the partial: its max is lse2, its sum 1, its accumulator the output.
    has_partial = row_valid & (covered > 0)
    lse2_offset = b * prefix_lse2_stride_b + row64 * prefix_lse2_stride_r + head
    row_max = tl.load(prefix_lse2_ptr + lse2_offset, mask=has_partial, other=float("-inf"))
    row_sum = tl.where(has_partial, 1.0, 0.0)
    prefix_offset = b * prefix_out_stride_b + row64 * prefix_out_stride_r + head * prefix_out_stride_h
    acc = tl.load(
        prefix_out_ptr + prefix_offset[:, None] + d[None, :], mask=has_partial[:, None] & in_head, other=0.0
    ).to(tl.float32)

    # Columns count from the window's start; the tail has negative ones.
    tail_start = tl.maximum(covered, 0) - prefix_len
    first_column = -tl.cdiv(tail_len, BLOCK_N) * BLOCK_N
    mask_offset = b * mask_stride_b + row64 * mask_stride_r
    for i in tl.range(0, tl.cdiv(window - first_column, BLOCK_N)):
        start = first_column + i * BLOCK_N
        column = start + n
        in_window = column < window
        # As a vector: newer interpreters take `vector & scalar` for an integer.
        is_window = row * 0 + start >= 0
        bits = tl.load(mask_ptr + mask_offset + start // 64, mask=row_valid & is_window, other=0)
        bits = (bits >> (start & 63)).to(tl.int32)
        visible = (((bits[:, None] >> n[None, :]) & 1) != 0) & in_window[None, :]
        seen = (((tl.reduce(bits, 0, _bit_or) >> n) & 1) != 0) & in_window
        if CAUSAL_PREFIX:
            visible = visible | ((column[None, :] >= tail_start[:, None]) & (column < 0)[None, :])
            seen = seen | ((column >= -tail_len) & (column < 0))

        position = prefix_len + column
        page_index = position // PAGE_SIZE
        page = tl.load(
            page_table_ptr + b * page_table_stride_b + page_index,
            mask=seen & (page_index < max_pages),
            other=0,
        )
        page = tl.maximum(page, 0).to(tl.int64)
        offset = position % PAGE_SIZE
        # Slots that no row of the tile sees are not read: 0 * NaN would leak out of V.
        key_mask = seen[:, None] & in_head
        k_offset = page * k_stride_page + kv_head * k_stride_head + offset * k_stride_token
        k = tl.load(k_ptr + k_offset[:, None] + d[None, :], mask=key_mask, other=0.0).to(DOT)
        v_offset = page * v_stride_page + kv_head * v_stride_head + offset * v_stride_token
        v = tl.load(v_ptr + v_offset[:, None] + d[None, :], mask=key_mask, other=0.0).to(DOT)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing yet keeps the max -inf, and -inf - -inf is NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DOT), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max

    acc = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    out_offset = b * out_stride_b + row64 * out_stride_r + head * out_stride_h
    tl.store(
        out_ptr + out_offset[:, None] + d[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=row_valid[:, None] & in_head,
    )


def choose_tile(batch: int, folded_rows: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """(BLOCK_M, num_warps): small tiles fill the GPU at small batch, large ones re-read fewer keys.

    Full-precision products and wide heads need more registers a row, hence lower limits.
    """
    largest = 16 if batch == 1 else 32 if batch < 8 else 64
    if dtype == torch.float32:
        largest = 16
    block_m = max(16, min(largest, triton.next_power_of_2(folded_rows)))
    return block_m, 8 if block_m * head_dim > 64 * 128 else 4


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
    block_m: int | None = None,
) -> None:
    """Launch the kernel; arguments as in the op, `block_m` overrides `choose_tile` (tests, benchmarks)."""
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    chosen_m, num_warps = choose_tile(batch, num_rows * group, head_dim, q.dtype)
    block_m = block_m or chosen_m
    tree_window_attention_kernel[(triton.cdiv(num_rows * group, block_m), batch * num_kv_heads)](
        q,
        k_cache,
        v_cache,
        page_table,
        prefix_lens,
        mask,
        prefix_out,
        prefix_lse2,
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
        CAUSAL_PREFIX=causal_prefix,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_cache.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_D=triton.next_power_of_2(head_dim),
        DOT=dot_dtype(_TL_DTYPES[q.dtype]),
        num_warps=num_warps,
        num_stages=2,
    )


# Strides of tensors with rows of head_dim elements, which is a multiple of 16.
_ROW_STRIDES = ("q_stride", "k_stride", "v_stride", "prefix_out_stride", "out_stride")
_AOT_CASES = (
    # (query, cache, BLOCK_M, HEAD_DIM, causal_prefix)
    ("bf16", "bf16", 64, 128, True),
    ("bf16", "bf16", 16, 80, False),
    ("bf16", "fp8e4nv", 64, 128, True),
    ("fp16", "fp16", 64, 256, True),
    ("fp32", "fp32", 16, 128, True),
)


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    specs = []
    for query, cache, block_m, head_dim, causal in _AOT_CASES:
        signature = dict.fromkeys(
            (name for name in tree_window_attention_kernel.arg_names if name.islower()), "i32"
        )
        signature |= {name: "i32:16" for name in signature if name.startswith(_ROW_STRIDES)}
        signature |= dict.fromkeys(("q_ptr", "prefix_out_ptr", "out_ptr"), f"*{query}:16")
        signature |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{cache}:16")
        signature |= dict.fromkeys(("page_table_ptr", "prefix_lens_ptr"), "*i32:16")
        signature |= {"mask_ptr": "*i64:16", "prefix_lse2_ptr": "*fp32:16", "scale_log2": "fp32"}
        constexprs = {
            "CAUSAL_PREFIX": causal,
            "GROUP": 4,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": 32,
            "BLOCK_M": block_m,
            "BLOCK_N": BLOCK_N,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "DOT": dot_dtype(_TL_DTYPES[names[query]]),
        }
        _, num_warps = choose_tile(8, block_m, head_dim, names[query])
        specs.append(
            (tree_window_attention_kernel, signature, constexprs, {"num_warps": num_warps, "num_stages": 2})
        )
    return specs
