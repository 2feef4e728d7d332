"""Triton kernels of `tree_decode`: split-KV over the pages in one pass, then a parallel merge of the splits.

Rows of one KV head are folded (m = r * group + g), so each key is read once per row tile. Key blocks that
lie in the prefix take an unmasked loop, by TMA where the layout allows; what is left of the prefix and the
window take a short masked loop. It must not know what the rows are, nor how tiles are chosen.
"""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from trtllm_tree.kernels._triton import INTERPRET, dot_dtype, tl, triton
from trtllm_tree.kernels.tree_decode.tiles import ROW_EXTRA, Tile, choose_tile, fits_tma, plan

_LOG2_E = 1.4426950408889634
_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _bit_or(a, b):
    return a | b


@triton.jit
def _page_of(table_ptr, index, max_pages):
    """Page of a table entry; what is beyond the table or negative is the dummy page 0."""
    return tl.maximum(tl.load(table_ptr + index, mask=index < max_pages, other=0), 0)


@triton.jit
def _load_box(
    desc,
    ptr,
    table_ptr,
    box,
    max_pages,
    kv_head,
    stride_page,
    stride_head,
    stride_token,
    TMA: tl.constexpr,
    BOX: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys [box * BOX, (box + 1) * BOX) as [BOX, BLOCK_D]: one TMA copy of one page, or gathered rows."""
    if TMA:
        page = _page_of(table_ptr, box, max_pages)
        rows = desc.load([page, kv_head, 0, 0]).reshape([BOX, BLOCK_D])
    else:
        position = box * BOX + tl.arange(0, BOX)
        d = tl.arange(0, BLOCK_D)
        page = _page_of(table_ptr, position // PAGE_SIZE, max_pages).to(tl.int64)
        offset = page * stride_page + kv_head.to(tl.int64) * stride_head + position % PAGE_SIZE * stride_token
        if HEAD_DIM == BLOCK_D:
            rows = tl.load(ptr + offset[:, None] + d[None, :])
        else:
            rows = tl.load(ptr + offset[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
    return rows


@triton.jit
def tree_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
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
    k_stride_page,
    k_stride_head,
    k_stride_token,
    v_stride_page,
    v_stride_head,
    v_stride_token,
    page_table_stride_b,
    mask_stride_b,
    mask_stride_r,
    out_stride_b,
    out_stride_r,
    out_stride_h,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    FP8_QUERY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BOX: tl.constexpr,
    BOXES: tl.constexpr,
    TAIL_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    QK: tl.constexpr,
    PV: tl.constexpr,
    ROW_EXTRA: tl.constexpr,
):
    BLOCK_N: tl.constexpr = BOX * BOXES
    # Row tiles of one split are neighbours, so that the second reader of a key finds it in L2.
    num_tiles = tl.cdiv(num_rows * GROUP, BLOCK_M)
    first_m = tl.program_id(0) % num_tiles * BLOCK_M
    split = tl.program_id(0) // num_tiles
    b = (tl.program_id(1) // num_kv_heads).to(tl.int64)
    kv_head = tl.program_id(1) % num_kv_heads
    kv_head64 = kv_head.to(tl.int64)
    m = first_m + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = m // GROUP
    row64 = row.to(tl.int64)
    head = kv_head64 * GROUP + m % GROUP
    row_valid = row < num_rows
    out_mask = row_valid[:, None] & (d < HEAD_DIM)[None, :]

    q_offset = b * q_stride_b + row64 * q_stride_r + head * q_stride_h
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=out_mask, other=0.0)
    if FP8_QUERY:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -448.0), 448.0).to(tl.float8e4nv)
    q = q.to(QK)

    # The masked rest counts as whole blocks, and all of it belongs to the last split.
    prefix_len = tl.load(prefix_lens_ptr + b)
    num_full = prefix_len // BLOCK_N
    num_blocks = num_full + tl.cdiv(prefix_len - num_full * BLOCK_N + window, BLOCK_N)
    first_block = (num_blocks * split // num_splits).to(tl.int32)
    last_block = tl.minimum(num_full, (num_blocks * (split + 1) // num_splits).to(tl.int32))
    table_ptr = page_table_ptr + b * page_table_stride_b

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for block in tl.range(first_block, last_block, num_stages=STAGES):
        box = block * BOXES
        # fmt: off
        k0 = _load_box(k_desc, k_ptr, table_ptr, box, max_pages, kv_head, k_stride_page, k_stride_head,
                       k_stride_token, TMA, BOX, PAGE_SIZE, HEAD_DIM, BLOCK_D)
        scores0 = tl.dot(q, tl.trans(k0.to(QK)), input_precision="ieee")
        block_max = tl.max(scores0, 1)
        if BOXES == 2:
            k1 = _load_box(k_desc, k_ptr, table_ptr, box + 1, max_pages, kv_head, k_stride_page,
                           k_stride_head, k_stride_token, TMA, BOX, PAGE_SIZE, HEAD_DIM, BLOCK_D)
            scores1 = tl.dot(q, tl.trans(k1.to(QK)), input_precision="ieee")
            block_max = tl.maximum(block_max, tl.max(scores1, 1))
        new_max = tl.maximum(row_max, block_max * scale_log2)
        rescale = tl.exp2(row_max - new_max)
        acc = acc * rescale[:, None]
        weights0 = tl.exp2(scores0 * scale_log2 - new_max[:, None])
        block_sum = tl.sum(weights0, 1)
        v0 = _load_box(v_desc, v_ptr, table_ptr, box, max_pages, kv_head, v_stride_page, v_stride_head,
                       v_stride_token, TMA, BOX, PAGE_SIZE, HEAD_DIM, BLOCK_D)
        acc = tl.dot(weights0.to(PV), v0.to(PV), acc, input_precision="ieee")
        if BOXES == 2:
            weights1 = tl.exp2(scores1 * scale_log2 - new_max[:, None])
            block_sum += tl.sum(weights1, 1)
            v1 = _load_box(v_desc, v_ptr, table_ptr, box + 1, max_pages, kv_head, v_stride_page,
                           v_stride_head, v_stride_token, TMA, BOX, PAGE_SIZE, HEAD_DIM, BLOCK_D)
            acc = tl.dot(weights1.to(PV), v1.to(PV), acc, input_precision="ieee")
        # fmt: on
        row_sum = row_sum * rescale + block_sum
        row_max = new_max

    if split == num_splits - 1:
        # Columns count from the window's start and blocks from a multiple of TAIL_N, which divides 64: the
        # mask bits of a block lie in one word. The rest of the prefix has negative columns.
        n = tl.arange(0, TAIL_N)
        rest = prefix_len - num_full * BLOCK_N
        first_column = -tl.cdiv(rest, TAIL_N) * TAIL_N
        mask_offset = b * mask_stride_b + row64 * mask_stride_r
        for i in tl.range(0, tl.cdiv(window - first_column, TAIL_N), num_stages=1):
            start = first_column + i * TAIL_N
            column = start + n
            in_rest = (column >= -rest) & (column < 0)
            bits = tl.load(mask_ptr + mask_offset + start // 64, mask=row_valid & (start >= 0), other=0)
            bits = bits >> (start & 63)
            any_bits = tl.reduce(bits, 0, _bit_or)
            in_window = column < window
            seen = ((((any_bits >> n) & 1) != 0) & in_window) | in_rest
            # Halves of the word, since 64-bit shifts of a whole tile cost registers.
            low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
            half = tl.where((n < 32)[None, :], low[:, None], high[:, None])
            visible = ((((half >> (n & 31)[None, :]) & 1) != 0) & in_window[None, :]) | in_rest[None, :]

            # Slots that no row of the tile sees are not read: 0 * NaN would leak out of V.
            position = prefix_len + column
            page_index = position // PAGE_SIZE
            page = tl.load(table_ptr + page_index, mask=seen & (page_index < max_pages), other=0)
            page = tl.maximum(page, 0).to(tl.int64)
            offset = position % PAGE_SIZE
            key_mask = seen[:, None] & (d < HEAD_DIM)[None, :]
            k_offset = page * k_stride_page + kv_head64 * k_stride_head + offset * k_stride_token
            k = tl.load(k_ptr + k_offset[:, None] + d[None, :], mask=key_mask, other=0.0).to(QK)
            v_offset = page * v_stride_page + kv_head64 * v_stride_head + offset * v_stride_token
            v = tl.load(v_ptr + v_offset[:, None] + d[None, :], mask=key_mask, other=0.0).to(PV)

            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A row that has seen nothing yet keeps the max -inf, and -inf - -inf is NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - base[:, None])
            rescale = tl.exp2(row_max - base)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            acc = tl.dot(weights.to(PV), v, acc * rescale[:, None], input_precision="ieee")
            row_max = new_max

    if SPLIT:
        num_heads = num_kv_heads * GROUP
        batch = tl.num_programs(1) // num_kv_heads
        index = ((split * batch + b) * num_rows + row64) * num_heads + head
        row_ptr = workspace_ptr + index * (HEAD_DIM + ROW_EXTRA)
        tl.store(row_ptr[:, None] + d[None, :], acc, mask=out_mask)
        tl.store(row_ptr + HEAD_DIM, row_max, mask=row_valid)
        tl.store(row_ptr + HEAD_DIM + 1, row_sum, mask=row_valid)
    else:
        acc = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
        out_offset = b * out_stride_b + row64 * out_stride_r + head * out_stride_h
        tl.store(out_ptr + out_offset[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)


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
    batch, num_rows, num_heads, head_dim = q.shape
    chosen_tile, chosen_splits = plan(q, k_cache)
    tile, num_splits = tile or chosen_tile, num_splits or chosen_splits
    num_outputs = batch * num_rows * num_heads
    if num_splits > 1:
        assert workspace.dtype == torch.float32 and workspace.is_contiguous(), "workspace must be float32"
        needed = num_splits * num_outputs * (head_dim + ROW_EXTRA)
        assert workspace.numel() >= needed, f"workspace has {workspace.numel()} elements, not {needed}"
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
    if num_splits == 1:
        return
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
