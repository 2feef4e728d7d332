"""How a block of K and V is fetched from the pages of one request. It must not know why a column is seen."""

from __future__ import annotations

from trtllm_tree.kernels._triton import tl, triton


@triton.jit
def page_at(page_table_ptr, max_pages, position, in_reach, PAGE_SIZE: tl.constexpr):
    """The page int64 of each `position`, looked up before it is known who sees it."""
    index = position // PAGE_SIZE
    page = tl.load(page_table_ptr + index, mask=in_reach & (index < max_pages), other=0)
    return tl.maximum(page, 0).to(tl.int64)


@triton.jit
def _all_requested(k, v, PER_REGISTER: tl.constexpr):
    """K and V, `PER_REGISTER` elements a register, after every load of both has been issued.

    Left alone, ptxas waits for a key before it requests the next few: three memory latencies in a row instead of one.
    No load sinks below a barrier, and no store into shared memory rises above what the compiler cannot see through.
    """
    if PER_REGISTER >= 2:
        tl.debug_barrier()
        move: tl.constexpr = "mov.b32 $0, $1;"
        k = tl.inline_asm_elementwise(move, "=r,r", [k], dtype=k.dtype, is_pure=False, pack=PER_REGISTER)
        v = tl.inline_asm_elementwise(move, "=r,r", [v], dtype=v.dtype, is_pure=False, pack=PER_REGISTER)
    return k, v


@triton.jit
def load_block(
    k_ptr,
    v_ptr,
    page,
    offset,
    seen,
    k_stride_page,
    k_stride_token,
    v_stride_page,
    v_stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PER_REGISTER: tl.constexpr,
):
    """K and V [BLOCK_N, BLOCK_D] at `offset` of each page, 0 where not seen. The pointers are those of one KV head.

    A slot that no row of the tile sees is not read: it may hold NaN, and 0 * NaN would leak out of V. Reading it and
    clearing V behind it, so as not to wait for the mask, was slower (H200, B 1: 4.6 us for 3.8).
    """
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = seen[:, None] & (d < HEAD_DIM)
    k_row = page * k_stride_page + offset * k_stride_token
    v_row = page * v_stride_page + offset * v_stride_token
    k = tl.load(k_ptr + k_row[:, None] + d, mask=mask, other=0.0)
    v = tl.load(v_ptr + v_row[:, None] + d, mask=mask, other=0.0)
    return _all_requested(k, v, PER_REGISTER)
