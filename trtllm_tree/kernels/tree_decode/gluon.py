"""Warp-specialised main kernel of `tree_decode` for Hopper, in Gluon.

A producer warp copies key blocks by TMA into a ring, and two warpgroups of 64 rows each consume them: the
softmax of one runs while the tensor cores work for the other, and within one, the scores of the next block
are issued before the values of this one. Under an FP8 cache a third warpgroup widens what the TMA brings to
float16 in shared memory. Same work split and workspace as `tree_decode_kernel`, for pages of 64 keys. The
scheme is that of FlashAttention-3 (Shah et al. 2024).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trtllm_tree.kernels.tree_decode.gluon_warps import consume, produce, ring, widen
from trtllm_tree.kernels.tree_decode.tiles import ROW_EXTRA

BLOCK_M = 128
PAGE_SIZE = 64
# Two pages a block. Rings of 2 and 3 blocks are equally fast on an H200 at 32k keys, 2 is faster below.
_BOXES = 2
_STAGES = 2
_GL_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


@gluon.jit
def tree_decode_specialised_kernel(
    q_ptr,
    k_desc,
    v_desc,
    page_table_ptr,
    prefix_lens_ptr,
    mask_ptr,
    out_ptr,
    workspace_ptr,
    scale_log2,
    num_rows,
    num_kv_heads,
    window,
    max_pages,
    num_splits,
    q_stride_b,
    q_stride_r,
    q_stride_h,
    page_table_stride_b,
    mask_stride_b,
    mask_stride_r,
    out_stride_b,
    out_stride_r,
    out_stride_h,
    SPLIT: gl.constexpr,
    FP8: gl.constexpr,
    FP8_QUERY: gl.constexpr,
    WIDE_LAYOUT: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BOX: gl.constexpr,
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_EXTRA: gl.constexpr,
):
    """One CTA: a row tile of one request and KV head over one split of its keys."""
    num_tiles = gl.cdiv(num_rows * GROUP, BLOCK_M)
    first_m = gl.program_id(0) % num_tiles * BLOCK_M
    split = gl.program_id(0) // num_tiles
    b = (gl.program_id(1) // num_kv_heads).to(gl.int64)
    kv_head = gl.program_id(1) % num_kv_heads
    head = kv_head.to(gl.int64) * GROUP

    # As in `tree_decode_kernel`: the masked rest is shared out as blocks, and all in the last split.
    BLOCK_N: gl.constexpr = BOX * BOXES
    prefix_len = gl.load(prefix_lens_ptr + b)
    num_full = prefix_len // BLOCK_N
    num_blocks = gl.cdiv(prefix_len + window, BLOCK_N)
    first_block = gl.minimum(num_full, num_blocks * split // num_splits)
    main_end = gl.minimum(num_full, num_blocks * (split + 1) // num_splits)
    end_block = gl.where(split == num_splits - 1, num_blocks, main_end)

    # What the consumers read: the TMA's ring itself, or the ring that `_widen` fills from it.
    DTYPE: gl.constexpr = k_desc.dtype
    LAYOUT: gl.constexpr = k_desc.layout
    K_READERS: gl.constexpr = 1 if FP8 and not FP8_QUERY else 2
    V_READERS: gl.constexpr = 1 if FP8 else 2
    k_ring, k_full, k_empty = ring(DTYPE, LAYOUT, K_READERS, STAGES, BOX, D)
    v_ring, v_full, v_empty = ring(DTYPE, LAYOUT, V_READERS, STAGES, BOX, D)
    q_ptr += b * q_stride_b + head * q_stride_h
    mask_ptr += b * mask_stride_b
    if SPLIT:
        # A row of the workspace takes the place of a row of the output.
        result_stride_h = num_kv_heads * 0 + HEAD_DIM + ROW_EXTRA
        result_stride_r = num_kv_heads * GROUP * (HEAD_DIM + ROW_EXTRA)
        batch = gl.num_programs(1) // num_kv_heads
        result_ptr = workspace_ptr + (split * batch + b) * num_rows * result_stride_r + head * result_stride_h
    else:
        result_stride_h = out_stride_h
        result_stride_r = out_stride_r
        result_ptr = out_ptr + b * out_stride_b + head * out_stride_h
    table_ptr = page_table_ptr + b * page_table_stride_b
    # fmt: off
    if FP8:
        v_wide, v_wide_full, v_wide_empty = ring(gl.float16, WIDE_LAYOUT, 2, STAGES, BOX, D)
        if FP8_QUERY:
            k_wide, k_wide_full, k_wide_empty = k_ring, k_full, k_empty
        else:
            k_wide, k_wide_full, k_wide_empty = ring(gl.float16, WIDE_LAYOUT, 2, STAGES, BOX, D)
        gl.warp_specialize(
            [
                (consume, (first_m, q_ptr, mask_ptr, result_ptr, scale_log2, num_rows, window, prefix_len,
                            q_stride_r, q_stride_h, mask_stride_r, result_stride_r, result_stride_h,
                            first_block, main_end, end_block, k_wide, v_wide, k_wide_full, k_wide_empty,
                            v_wide_full, v_wide_empty, SPLIT, FP8, FP8_QUERY, GROUP, HEAD_DIM, D, BOX,
                            STAGES, ROW_EXTRA)),
                (consume, (first_m + 64, q_ptr, mask_ptr, result_ptr, scale_log2, num_rows, window,
                            prefix_len, q_stride_r, q_stride_h, mask_stride_r, result_stride_r,
                            result_stride_h, first_block, main_end, end_block, k_wide, v_wide, k_wide_full,
                            k_wide_empty, v_wide_full, v_wide_empty, SPLIT, FP8, FP8_QUERY, GROUP,
                            HEAD_DIM, D, BOX, STAGES, ROW_EXTRA)),
                (widen, (first_block, end_block, k_ring, v_ring, k_full, k_empty, v_full, v_empty, k_wide,
                          v_wide, k_wide_full, k_wide_empty, v_wide_full, v_wide_empty, FP8_QUERY, BOX, D,
                          STAGES)),
                (produce, (k_desc, v_desc, table_ptr, kv_head, max_pages, first_block, end_block, k_ring,
                            v_ring, k_full, k_empty, v_full, v_empty, STAGES, BOXES)),
            ],
            [4, 4, 1],
            [224, 40, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (first_m, q_ptr, mask_ptr, result_ptr, scale_log2, num_rows, window, prefix_len,
                            q_stride_r, q_stride_h, mask_stride_r, result_stride_r, result_stride_h,
                            first_block, main_end, end_block, k_ring, v_ring, k_full, k_empty, v_full,
                            v_empty, SPLIT, FP8, FP8_QUERY, GROUP, HEAD_DIM, D, BOX, STAGES, ROW_EXTRA)),
                (consume, (first_m + 64, q_ptr, mask_ptr, result_ptr, scale_log2, num_rows, window,
                            prefix_len, q_stride_r, q_stride_h, mask_stride_r, result_stride_r,
                            result_stride_h, first_block, main_end, end_block, k_ring, v_ring, k_full,
                            k_empty, v_full, v_empty, SPLIT, FP8, FP8_QUERY, GROUP, HEAD_DIM, D, BOX,
                            STAGES, ROW_EXTRA)),
                (produce, (k_desc, v_desc, table_ptr, kv_head, max_pages, first_block, end_block, k_ring,
                            v_ring, k_full, k_empty, v_full, v_empty, STAGES, BOXES)),
            ],
            [4, 1],
            [240, 24],
        )
    # fmt: on


def constexprs(head_dim: int, group: int, *, split: bool, fp8: bool, fp8_query: bool) -> dict[str, object]:
    """Compile-time arguments of the kernel."""
    return {
        "SPLIT": split,
        "FP8": fp8,
        "FP8_QUERY": fp8_query,
        "WIDE_LAYOUT": box_layout(head_dim, torch.float16),
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "D": 64 if head_dim <= 64 else 128,
        "BLOCK_M": BLOCK_M,
        "BOX": PAGE_SIZE,
        "BOXES": _BOXES,
        "STAGES": _STAGES,
        "ROW_EXTRA": ROW_EXTRA,
    }


def box_layout(head_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Shared-memory layout of one page of one head."""
    box = [1, 1, PAGE_SIZE, 64 if head_dim <= 64 else 128]
    return gl.NVMMASharedLayout.get_default_for(box, _GL_DTYPES[dtype])


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    *,
    window: int,
    scale_log2: float,
    out: torch.Tensor,
    workspace: torch.Tensor,
    num_splits: int,
    fp8_query: bool,
) -> None:
    """Launch the main kernel; the merge is the caller's if `num_splits` > 1."""
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    constants = constexprs(
        head_dim, num_heads // num_kv_heads, split=num_splits > 1, fp8=fp8, fp8_query=fp8_query
    )
    box, layout = [1, 1, PAGE_SIZE, constants["D"]], box_layout(head_dim, k_cache.dtype)
    num_tiles = -(-num_rows * constants["GROUP"] // BLOCK_M)
    tree_decode_specialised_kernel[(num_tiles * num_splits, batch * num_kv_heads)](
        q,
        TensorDescriptor.from_tensor(k_cache, box, layout),
        TensorDescriptor.from_tensor(v_cache, box, layout),
        page_table,
        prefix_lens,
        mask,
        out,
        workspace,
        scale_log2,
        num_rows,
        num_kv_heads,
        window,
        page_table.shape[1],
        num_splits,
        *q.stride()[:3],
        page_table.stride(0),
        *mask.stride()[:2],
        *out.stride()[:3],
        **constants,
        num_warps=4,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test, for sm_90 only."""
    specs = []
    for query, cache, head_dim, split, fp8_query in (
        ("bf16", torch.bfloat16, 128, True, False),
        ("fp16", torch.float16, 80, False, False),
        ("bf16", torch.bfloat16, 64, True, False),
        ("bf16", torch.float8_e4m3fn, 128, True, False),
        ("bf16", torch.float8_e4m3fn, 128, True, True),
        ("fp16", torch.float8_e4m3fn, 64, False, True),
    ):
        fp8 = cache == torch.float8_e4m3fn
        constants = constexprs(head_dim, 4, split=split, fp8=fp8, fp8_query=fp8_query)
        layout = box_layout(head_dim, cache)
        signature = {arg: "i32" for arg in tree_decode_specialised_kernel.arg_names if arg.islower()}
        signature |= {arg: "i32:16" for arg in signature if arg.startswith(("q_stride", "out_stride"))}
        signature |= dict.fromkeys(("q_ptr", "out_ptr"), f"*{query}:16")
        signature |= dict.fromkeys(("page_table_ptr", "prefix_lens_ptr"), "*i32:16")
        signature |= {"mask_ptr": "*i64:16", "workspace_ptr": "*fp32:16", "scale_log2": "fp32"}
        box = f"tensordesc<{'fp8e4nv' if fp8 else query}[1, 1, {PAGE_SIZE}, {constants['D']}],{layout!r}>"
        signature |= dict.fromkeys(("k_desc", "v_desc"), box)
        specs.append((tree_decode_specialised_kernel, signature, constants, {"num_warps": 4}))
    return specs
