"""`tree_decode` in Triton: launches the split-KV kernel (or its specialised twin), then merges the splits in parallel.

Owns the choice between the two, what their launches need (descriptors, constants), and the merge. It must not know
what the rows are, nor how tiles are chosen.
"""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from trtllm_tree.kernels._triton import INTERPRET, dot_dtype, tl, triton
from trtllm_tree.kernels.tree_decode.split_kv import tree_decode_kernel
from trtllm_tree.kernels.tree_decode.tiles import ROW_EXTRA, Tile, choose_tile, fits_tma, plan

_LOG2_E = 1.4426950408889634
_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def tree_decode_merge_kernel(
    workspace_ptr,
    out_ptr,
    num_outputs,
    num_rows,
    num_heads,
    num_splits,
    out_stride_b,
    out_stride_r,
    out_stride_h,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_EXTRA: tl.constexpr,
):
    """Each program merges a few rows, reading BLOCK_S splits of them at once."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    i64 = i.to(tl.int64)
    in_head = (d < HEAD_DIM)[None, None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.range(0, num_splits, BLOCK_S):
        split = first + s
        valid = (i < num_outputs)[:, None] & (split < num_splits)[None, :]
        index = split.to(tl.int64)[None, :] * num_outputs + i64[:, None]
        row_ptr = workspace_ptr + index * (HEAD_DIM + ROW_EXTRA)
        acc = tl.load(row_ptr[:, :, None] + d[None, None, :], mask=valid[:, :, None] & in_head, other=0.0)
        split_max = tl.load(row_ptr + HEAD_DIM, mask=valid, other=float("-inf"))  # [ROWS, BLOCK_S]
        split_sum = tl.load(row_ptr + HEAD_DIM + 1, mask=valid, other=0.0)
        new_top = tl.maximum(top, tl.max(split_max, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(split_max - base[:, None])
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(weight * split_sum, 1)
        merged = merged * rescale[:, None] + tl.sum(weight[:, :, None] * acc, 1)
        top = new_top
    merged = merged / tl.where(total > 0.0, total, 1.0)[:, None]
    head = i64 % num_heads
    row = i64 // num_heads % num_rows
    b = i64 // num_heads // num_rows
    out_offset = b * out_stride_b + row * out_stride_r + head * out_stride_h
    tl.store(
        out_ptr + out_offset[:, None] + d[None, :],
        merged.to(out_ptr.dtype.element_ty),
        mask=(i < num_outputs)[:, None] & (d < HEAD_DIM)[None, :],
    )


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    *,
    window: int,
    scale: float,
    fp8_query: bool,
    out: torch.Tensor,
    workspace: torch.Tensor,
    tile: Tile | None = None,
    num_splits: int | None = None,
    use_tma: bool | None = None,
    specialise: bool | None = None,
) -> None:
    """Launch main and merge kernel; arguments as in the op, the last four override choices (tests, tuning)."""
    chosen_tile, chosen_splits = plan(q, k_cache)
    tile, num_splits = tile or chosen_tile, num_splits or chosen_splits
    check_workspace(workspace, out, num_splits)
    if use_tma is None:
        has_tma = INTERPRET or torch.cuda.get_device_capability(q.device) >= (9, 0)
        use_tma = has_tma and fits_tma(k_cache, tile.block_n) and fits_tma(v_cache, tile.block_n)
    if specialise is None:
        specialise = use_tma and _can_specialise(q, k_cache, tile)
    common = (q, k_cache, v_cache, page_table, prefix_lens, mask)
    options = {"window": window, "scale_log2": scale * _LOG2_E, "out": out, "workspace": workspace}
    if specialise:
        from trtllm_tree.kernels.tree_decode import gluon

        gluon.launch(*common, **options, num_splits=num_splits, fp8_query=fp8_query)
    else:
        _launch_main(*common, **options, tile=tile, num_splits=num_splits, tma=use_tma, fp8_query=fp8_query)
    merge_splits(workspace, out, num_splits)


def check_workspace(workspace: torch.Tensor, out: torch.Tensor, num_splits: int) -> None:
    """Refuse a workspace that cannot hold the partials of `num_splits` splits."""
    if num_splits == 1:
        return
    assert workspace.dtype == torch.float32 and workspace.is_contiguous(), "workspace must be float32"
    needed = num_splits * out.shape[:3].numel() * (out.shape[3] + ROW_EXTRA)
    assert workspace.numel() >= needed, f"workspace has {workspace.numel()} elements, not {needed}"


def merge_splits(workspace: torch.Tensor, out: torch.Tensor, num_splits: int) -> None:
    """Merge the partials in `workspace` into `out` [B, R, Hq, D]; with one split there are none."""
    if num_splits == 1:
        return
    num_rows, num_heads, head_dim = out.shape[1:]
    num_outputs = out.shape[:3].numel()
    merge = _merge_constexprs(head_dim, num_splits)
    tree_decode_merge_kernel[(triton.cdiv(num_outputs, merge["ROWS"]),)](
        workspace, out, num_outputs, num_rows, num_heads, num_splits, *out.stride()[:3], **merge, num_warps=1
    )


def _can_specialise(q: torch.Tensor, k_cache: torch.Tensor, tile: Tile) -> bool:
    """Whether the warp-specialised kernel does this call: its tile, on a Hopper GPU.

    Gluon's interface is not stable yet, so only the release it was written for is used.
    """
    if INTERPRET or not triton.__version__.startswith("3.6."):
        return False
    return (
        torch.cuda.get_device_capability(q.device) == (9, 0)
        and (tile.block_m, tile.block_n, k_cache.shape[2]) == (128, 128, 64)
        and k_cache.element_size() <= 2
        and q.shape[3] <= 128
    )


def _launch_main(
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
    tile: Tile,
    num_splits: int,
    tma: bool,
    fp8_query: bool,
) -> None:
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    if fp8_query and INTERPRET:
        # The interpreter loses a carry when it rounds to FP8, so it gets values that are exact in FP8.
        q = q.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(q.dtype)
    fp8 = k_cache.element_size() == 1
    box = [1, 1, page_size, triton.next_power_of_2(head_dim)]
    tree_decode_kernel[(triton.cdiv(num_rows * group, tile.block_m) * num_splits, batch * num_kv_heads)](
        q,
        k_cache,
        v_cache,
        TensorDescriptor.from_tensor(k_cache, box) if tma else None,
        TensorDescriptor.from_tensor(v_cache, box) if tma else None,
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
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        page_table.stride(0),
        *mask.stride()[:2],
        *out.stride()[:3],
        **_constexprs(
            tile, q.dtype, fp8, head_dim, page_size, tma, fp8_query, group=group, split=num_splits > 1
        ),
        num_warps=tile.num_warps,
    )


def _constexprs(
    tile: Tile,
    dtype: torch.dtype,
    fp8: bool,
    head_dim: int,
    page_size: int,
    tma: bool,
    fp8_query: bool,
    *,
    group: int,
    split: bool,
) -> dict[str, object]:
    wide = dot_dtype(tl.float16 if fp8 else _TL_DTYPES[dtype])
    box = page_size if tma else tile.block_n
    return {
        "SPLIT": split,
        "TMA": tma,
        "FP8_QUERY": fp8_query,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": page_size,
        "BLOCK_M": tile.block_m,
        "BOX": box,
        "BOXES": tile.block_n // box,
        # Keys per masked block; divides 64.
        "TAIL_N": 32 if head_dim > 128 else min(64, tile.block_n),
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "STAGES": tile.num_stages,
        "QK": dot_dtype(tl.float8e4nv) if fp8_query else wide,
        "PV": wide,
        "ROW_EXTRA": ROW_EXTRA,
    }


def _merge_constexprs(head_dim: int, num_splits: int) -> dict[str, int]:
    """One warp reads up to 4096 elements at once.

    Measured on an H200 at B 1, 8k keys, 33 and 16 splits: with 1 warp 3.7 and 2.6 us, with 4 warps 7 and 4.
    """
    block_d = triton.next_power_of_2(head_dim)
    block_s = min(triton.next_power_of_2(num_splits), 4096 // block_d, 32)
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_S": block_s,
        "ROWS": max(1, 1024 // (block_s * block_d)),
        "ROW_EXTRA": ROW_EXTRA,
    }


# Strides of tensors with rows of head_dim elements, which is a multiple of 16.
_ROW_STRIDES = ("q_stride", "k_stride", "v_stride", "out_stride")
_AOT_CASES = (
    # (query, cache, folded rows, head_dim, page_size, TMA, fp8_query, split)
    ("bf16", "bf16", 128, 128, 64, True, False, True),
    ("bf16", "bf16", 64, 128, 64, True, False, True),
    ("bf16", "bf16", 128, 128, 16, False, False, False),
    ("bf16", "bf16", 4, 80, 32, False, False, True),
    ("bf16", "fp8e4nv", 128, 128, 64, True, False, True),
    ("bf16", "fp8e4nv", 128, 128, 64, True, True, True),
    ("bf16", "fp8e4nv", 64, 64, 64, True, True, False),
    ("fp16", "fp16", 128, 256, 64, True, False, True),
    ("fp32", "fp32", 64, 128, 16, False, False, True),
)


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    specs = [_aot_decode(*case) for case in _AOT_CASES]
    for head_dim, num_splits in ((128, 33), (256, 16), (64, 2)):
        signature = {name: "i32" for name in tree_decode_merge_kernel.arg_names if name.islower()}
        signature |= {name: "i32:16" for name in signature if name.startswith("out_stride")}
        signature |= {"workspace_ptr": "*fp32:16", "out_ptr": "*bf16:16"}
        constexprs = _merge_constexprs(head_dim, num_splits)
        specs.append((tree_decode_merge_kernel, signature, constexprs, {"num_warps": 1}))
    return specs


def _aot_decode(
    query: str, cache: str, folded: int, head_dim: int, page: int, tma: bool, fp8_query: bool, split: bool
) -> tuple[object, dict[str, str], dict[str, object], dict[str, int]]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[query]
    fp8 = cache == "fp8e4nv"
    tile = choose_tile(folded, head_dim, 1 if fp8 else dtype.itemsize)
    constexprs = _constexprs(tile, dtype, fp8, head_dim, page, tma, fp8_query, group=4, split=split)
    names = tree_decode_kernel.arg_names
    signature = {name: "i32" for name in names if name.islower()}
    signature |= {name: "i32:16" for name in signature if name.startswith(_ROW_STRIDES)}
    signature |= dict.fromkeys(("q_ptr", "out_ptr"), f"*{query}:16")
    signature |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{cache}:16")
    signature |= dict.fromkeys(("page_table_ptr", "prefix_lens_ptr"), "*i32:16")
    signature |= {"mask_ptr": "*i64:16", "workspace_ptr": "*fp32:16", "scale_log2": "fp32"}
    if tma:
        box = f"tensordesc<{cache}[1, 1, {constexprs['BOX']}, {constexprs['BLOCK_D']}]>"
        signature |= dict.fromkeys(("k_desc", "v_desc"), box)
    else:
        constexprs |= {"k_desc": None, "v_desc": None}
    return (tree_decode_kernel, signature, constexprs, {"num_warps": tile.num_warps})
