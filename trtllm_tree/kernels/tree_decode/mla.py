"""`tree_decode` over a latent cache (MLA): prefix and masked window in one pass, each latent row read once.

All query heads share one latent row, so rows and heads are folded (m = r * Hq + h). The row's leading channels are the
key's latent part and the value; the rotary channels behind them add a second product. The split of the work and the
merge are those of the plain form. It must not know what the rows are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_tree.kernels._triton import bit_or, dot_dtype, tl, triton
from trtllm_tree.kernels.tree_decode.tiles import ROW_EXTRA, choose_splits, processors
from trtllm_tree.kernels.tree_decode.triton import check_workspace, merge_splits

_LOG2_E = 1.4426950408889634
# 99 KiB of shared memory a CTA.
_SMALL_PARTS = ((8, 6), (8, 9), (12, 0), (12, 1))
_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _load_rows(ptr, row, mask, channels: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] channels at the row offsets `row`, 0 where not `mask` or beyond `channels`."""
    d = tl.arange(0, BLOCK)
    return tl.load(ptr + row[:, None] + d[None, :], mask=mask[:, None] & (d < channels)[None, :], other=0.0)


@triton.jit
def tree_decode_mla_kernel(
    q_ptr,
    latent_ptr,
    page_table_ptr,
    prefix_lens_ptr,
    mask_ptr,
    out_ptr,
    workspace_ptr,
    scale_log2,
    num_rows,
    window,
    max_pages,
    num_splits,
    q_stride_b,
    q_stride_r,
    q_stride_h,
    latent_stride_page,
    latent_stride_token,
    page_table_stride_b,
    mask_stride_b,
    mask_stride_r,
    out_stride_b,
    out_stride_r,
    out_stride_h,
    SPLIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    ROW_EXTRA: tl.constexpr,
):
    """One program: (row tile and split, request)."""
    num_tiles = tl.cdiv(num_rows * NUM_HEADS, BLOCK_M)
    first_m = tl.program_id(0) % num_tiles * BLOCK_M
    split = tl.program_id(0) // num_tiles
    b = tl.program_id(1).to(tl.int64)
    m = first_m + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    row = m // NUM_HEADS
    row64 = row.to(tl.int64)
    head = m % NUM_HEADS
    row_valid = row < num_rows

    q_row = b * q_stride_b + row64 * q_stride_r + head * q_stride_h
    q = _load_rows(q_ptr, q_row, row_valid, VALUE_DIM, BLOCK_V).to(DOT)
    if ROPE_DIM > 0:
        q_rope = _load_rows(q_ptr + VALUE_DIM, q_row, row_valid, ROPE_DIM, BLOCK_R).to(DOT)

    # Blocks as in the plain kernel: the masked rest counts as whole blocks and belongs to the last split.
    prefix_len = tl.load(prefix_lens_ptr + b)
    num_full = prefix_len // BLOCK_N
    rest = prefix_len - num_full * BLOCK_N
    num_blocks = num_full + tl.cdiv(rest + window, BLOCK_N)
    first_block = (num_blocks * split // num_splits).to(tl.int32)
    last_block = tl.minimum(num_full, (num_blocks * (split + 1) // num_splits).to(tl.int32))
    table_ptr = page_table_ptr + b * page_table_stride_b

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    every = n >= 0
    for block in tl.range(first_block, last_block, num_stages=STAGES):
        position = block * BLOCK_N + n
        page = tl.load(table_ptr + position // PAGE_SIZE, mask=position // PAGE_SIZE < max_pages, other=0)
        page = tl.maximum(page, 0).to(tl.int64)
        slot = page * latent_stride_page + position % PAGE_SIZE * latent_stride_token
        latent = _load_rows(latent_ptr, slot, every, VALUE_DIM, BLOCK_V).to(DOT)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        if ROPE_DIM > 0:
            rope = _load_rows(latent_ptr + VALUE_DIM, slot, every, ROPE_DIM, BLOCK_R).to(DOT)
            scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DOT), latent, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max

    if split == num_splits - 1:
        # Columns count from the window's start; the rest of the prefix has negative ones.
        first_column = -tl.cdiv(rest, BLOCK_N) * BLOCK_N
        mask_row = mask_ptr + b * mask_stride_b + row64 * mask_stride_r
        for i in tl.range(0, tl.cdiv(window - first_column, BLOCK_N), num_stages=1):
            start = first_column + i * BLOCK_N
            column = start + n
            in_rest = (column >= -rest) & (column < 0)
            # BLOCK_N divides 64, so the bits of a block lie in one word.
            # As a vector: newer interpreters take `vector & scalar` for an integer.
            has_columns = mask_row.to(tl.int64) * 0 + start >= 0
            word = tl.load(mask_row + start // 64, mask=row_valid & has_columns, other=0)
            # As halves of 32 bits: a whole tile of 64-bit shifts would cost registers.
            low = (word >> (start & 63)).to(tl.int32)
            bits, any_bits = low[:, None], tl.reduce(low, 0, bit_or)
            if BLOCK_N > 32:
                high = (word >> 32).to(tl.int32)
                bits = tl.where((n < 32)[None, :], bits, high[:, None])
                any_bits = tl.where(n < 32, any_bits, tl.reduce(high, 0, bit_or))
            inside = column < window
            visible = ((bits >> (n & 31)[None, :]) & 1) != 0
            visible = visible & inside[None, :] | in_rest[None, :]
            seen = ((any_bits >> (n & 31)) & 1) != 0
            seen = seen & inside | in_rest
            # Slots that no row of the tile sees are not read: 0 * NaN would leak out of the values.
            position = prefix_len + column
            index = position // PAGE_SIZE
            page = tl.load(table_ptr + index, mask=seen & (index < max_pages), other=0)
            page = tl.maximum(page, 0).to(tl.int64)
            slot = page * latent_stride_page + position % PAGE_SIZE * latent_stride_token
            latent = _load_rows(latent_ptr, slot, seen, VALUE_DIM, BLOCK_V).to(DOT)
            scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
            if ROPE_DIM > 0:
                rope = _load_rows(latent_ptr + VALUE_DIM, slot, seen, ROPE_DIM, BLOCK_R).to(DOT)
                scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
            scores = tl.where(visible, scores * scale_log2, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A row that has seen nothing yet keeps the max -inf, and -inf - -inf is NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - base[:, None])
            rescale = tl.exp2(row_max - base)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            acc = tl.dot(weights.to(DOT), latent, acc * rescale[:, None], input_precision="ieee")
            row_max = new_max

    d = tl.arange(0, BLOCK_V)
    out_mask = row_valid[:, None] & (d < VALUE_DIM)[None, :]
    if SPLIT:
        index = ((split * tl.num_programs(1) + b) * num_rows + row64) * NUM_HEADS + head
        row_ptr = workspace_ptr + index * (VALUE_DIM + ROW_EXTRA)
        tl.store(row_ptr[:, None] + d[None, :], acc, mask=out_mask)
        tl.store(row_ptr + VALUE_DIM, row_max, mask=row_valid)
        tl.store(row_ptr + VALUE_DIM + 1, row_sum, mask=row_valid)
    else:
        acc = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
        out_row = b * out_stride_b + row64 * out_stride_r + head * out_stride_h
        tl.store(out_ptr + out_row[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@dataclass(frozen=True)
class LatentTile:
    """What one CTA works on: `block_m` folded rows against `block_n` latent rows an iteration; 64 at most."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tile(
    folded_rows: int, value_dim: int, itemsize: int, capability: tuple[int, int] | None = None
) -> LatentTile:
    """The tile for R * Hq rows; `itemsize` is that of a cache element in bytes, `capability` the device's.

    Tiles of 64 rows and 64 latent rows need all of Hopper's shared memory; on an H200 (B 8, 8k keys, N 32, 128 heads)
    they take 2.30 ms where 32 x 32 take 6.57. Blackwell's layout of them does not fit, nor do smaller parts.
    """
    if itemsize == 4:
        return LatentTile(16, 16, 8, 1)
    if folded_rows <= 16 or capability in _SMALL_PARTS:
        return LatentTile(16, 32, 4, 2)
    if capability is not None and capability[0] == 9:
        return LatentTile(64 if folded_rows > 32 else 32, 64, 8, 2)
    return LatentTile(32 if value_dim > 256 else 64, 32, 8, 2)


def plan(q: torch.Tensor, latent: torch.Tensor, value_dim: int) -> tuple[LatentTile, int]:
    """Tile and number of splits of one call. Like the plain form's, from shapes alone."""
    batch, num_rows, num_heads, _ = q.shape
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    tile = choose_tile(num_rows * num_heads, value_dim, latent.element_size(), capability)
    num_programs = batch * -(-num_rows * num_heads // tile.block_m)
    return tile, choose_splits(num_programs, processors(q.device))


def partials_shape(q: torch.Tensor, latent: torch.Tensor, value_dim: int) -> tuple[int, int, int]:
    """Shape of the workspace, see the op."""
    _, num_splits = plan(q, latent, value_dim)
    if num_splits == 1:
        return (0, 0, 0)
    return (num_splits, q.shape[0] * q.shape[1] * q.shape[2], value_dim + ROW_EXTRA)


def launch(
    q: torch.Tensor,
    latent: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    *,
    window: int,
    scale: float,
    out: torch.Tensor,
    workspace: torch.Tensor,
    tile: LatentTile | None = None,
    num_splits: int | None = None,
) -> None:
    """Launch main and merge kernel; arguments as in the op, the last two override choices (tests, tuning)."""
    batch, num_rows, num_heads, query_dim = q.shape
    chosen_tile, chosen_splits = plan(q, latent, out.shape[3])
    tile, num_splits = tile or chosen_tile, num_splits or chosen_splits
    check_workspace(workspace, out, num_splits)
    num_tiles = triton.cdiv(num_rows * num_heads, tile.block_m)
    tree_decode_mla_kernel[(num_tiles * num_splits, batch)](
        q,
        latent,
        page_table,
        prefix_lens,
        mask,
        out,
        workspace,
        scale * _LOG2_E,
        num_rows,
        window,
        page_table.shape[1],
        num_splits,
        *q.stride()[:3],
        latent.stride(0),
        latent.stride(2),
        page_table.stride(0),
        *mask.stride()[:2],
        *out.stride()[:3],
        PAGE_SIZE=latent.shape[2],
        **_constexprs(
            tile, q.dtype, latent.dtype, num_heads, out.shape[3], query_dim - out.shape[3], num_splits > 1
        ),
        num_warps=tile.num_warps,
    )
    merge_splits(workspace, out, num_splits)


def _constexprs(
    tile: LatentTile,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_heads: int,
    value_dim: int,
    rope_dim: int,
    split: bool,
) -> dict[str, object]:
    # FP8 widens to float16 in one instruction on Hopper, to bfloat16 in several.
    fp8 = cache_dtype == torch.float8_e4m3fn
    return {
        "SPLIT": split,
        "NUM_HEADS": num_heads,
        "VALUE_DIM": value_dim,
        "ROPE_DIM": rope_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        # A matrix unit wants 16 channels at least.
        "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
        "BLOCK_R": max(16, triton.next_power_of_2(max(rope_dim, 1))),
        "STAGES": tile.num_stages,
        "DOT": dot_dtype(tl.float16 if fp8 else _TL_DTYPES[dtype]),
        "ROW_EXTRA": ROW_EXTRA,
    }


_AOT_CASES = (
    # (query, cache, rows, heads, value channels, rotary channels, split, capability whose tile it is)
    ("bf16", "bf16", 32, 128, 512, 64, True, None),
    ("bf16", "bf16", 32, 128, 512, 64, True, (9, 0)),
    ("bf16", "bf16", 1, 16, 512, 64, False, None),
    ("bf16", "fp8e4nv", 32, 16, 512, 64, True, None),
    ("bf16", "fp8e4nv", 32, 16, 512, 64, True, (9, 0)),
    ("fp16", "fp16", 8, 20, 256, 32, False, None),
    ("fp32", "fp32", 4, 4, 128, 64, True, None),
)
_AOT_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
}


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    specs = []
    for query, cache, rows, heads, value_dim, rope_dim, split, capability in _AOT_CASES:
        dtype, cache_dtype = _AOT_DTYPES[query], _AOT_DTYPES[cache]
        tile = choose_tile(rows * heads, value_dim, cache_dtype.itemsize, capability)
        signature = {name: "i32" for name in tree_decode_mla_kernel.arg_names if name.islower()}
        signature |= {
            name: "i32:16"
            for name in signature
            if name.startswith(("q_stride", "latent_stride", "out_stride"))
        }
        signature |= dict.fromkeys(("q_ptr", "out_ptr"), f"*{query}:16") | {"latent_ptr": f"*{cache}:16"}
        signature |= dict.fromkeys(("page_table_ptr", "prefix_lens_ptr"), "*i32:16")
        signature |= {"mask_ptr": "*i64:16", "workspace_ptr": "*fp32:16", "scale_log2": "fp32"}
        constexprs = _constexprs(tile, dtype, cache_dtype, heads, value_dim, rope_dim, split)
        # The Hopper tile is the fastest although it spills.
        options = {"num_warps": tile.num_warps, "spill_bytes": 1056 if capability else 0}
        specs.append((tree_decode_mla_kernel, signature, {"PAGE_SIZE": 64, **constexprs}, options))
    return specs
