"""Triton kernel of `compact_window_rows`: one launch for all groups, copying words over a tile table.

It must not know what a row holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trtllm_tree.kernels._triton import tl, triton

if TYPE_CHECKING:
    from trtllm_tree.kernels.compact_window_rows.row_table import RowTable

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_BLOCK_DEPTHS = 8
# About one wave: programs that find nothing to move cost their start alone, so there must not be many.
_MAX_PROGRAMS = 4 * 132
_NUM_WARPS = 4


@triton.jit
def compact_window_rows_kernel(
    tiles_ptr,
    slots_ptr,
    path_ptr,
    num_tiles,
    max_depth,
    tiles_stride,
    slots_stride_g,
    slots_stride_b,
    path_stride_b,
    WORD: tl.constexpr,
    BLOCK_PATH: tl.constexpr,
    BLOCK_DEPTHS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Program (p, b) moves the tiles p, p + num_programs, ... of request b. Strides in the table are in words."""
    b = tl.program_id(1).to(tl.int64)
    path_ptr += b * path_stride_b
    slots_ptr += b * slots_stride_b
    depths = tl.arange(0, BLOCK_PATH)
    nodes = tl.load(path_ptr + depths, mask=(depths > 0) & (depths < max_depth), other=-1)
    # The path increases, so a row moves forward or stays, and behind the first that moves all do.
    moves = nodes > depths
    last = tl.max(tl.where(moves, depths, 0))
    if last > 0:
        first = tl.min(tl.where(moves, depths, last))
        for start in tl.range(first, last + 1, BLOCK_DEPTHS):
            depth = start + tl.arange(0, BLOCK_DEPTHS)
            source = tl.load(path_ptr + depth, mask=depth <= last, other=-1)
            moved = source > depth
            current = tl.full((), -1, tl.int64)
            from_row = tl.zeros((BLOCK_DEPTHS,), tl.int64)
            to_row = tl.zeros((BLOCK_DEPTHS,), tl.int64)
            for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
                tile_ptr = tiles_ptr + tile * tiles_stride
                group = tl.load(tile_ptr)
                region_ptr = tl.load(tile_ptr + 1).to(tl.pointer_type(WORD))
                word = tl.load(tile_ptr + 2).to(tl.uint32) + tl.arange(0, BLOCK_WORDS).to(tl.uint32)
                words_per_slot = tl.load(tile_ptr + 3).to(tl.uint32)
                words_per_row = tl.load(tile_ptr + 4).to(tl.uint32)
                column = (word // words_per_row).to(tl.int64) * tl.load(tile_ptr + 7) + word % words_per_row
                # Said, or the compiler lines up a warp across rows instead of along one.
                column = tl.max_contiguous(column, RUN)
                if group != current:
                    # Division is dear, and most tiles follow one of their group.
                    current = group
                    page_size = tl.load(tile_ptr + 5).to(tl.uint32)
                    page_stride, token_stride = tl.load(tile_ptr + 6), tl.load(tile_ptr + 8)
                    row_slots_ptr = slots_ptr + group * slots_stride_g
                    slot = tl.load(row_slots_ptr + source, mask=moved, other=0).to(tl.uint32)
                    from_row = (slot // page_size) * page_stride + (slot % page_size) * token_stride
                    slot = tl.load(row_slots_ptr + depth, mask=moved, other=0).to(tl.uint32)
                    to_row = (slot // page_size) * page_stride + (slot % page_size) * token_stride
                mask = moved[:, None] & (word < words_per_slot)[None, :]
                rows = tl.load(region_ptr + (from_row[:, None] + column[None, :]), mask=mask, other=0)
                # A row may be both source and target in this block: all threads read before any writes. Later
                # blocks read rows path[d] >= d only, which no earlier block wrote.
                tl.debug_barrier()
                tl.store(region_ptr + (to_row[:, None] + column[None, :]), rows, mask=mask)


def launch(table: RowTable, slots: torch.Tensor, path: torch.Tensor, *, max_depth: int) -> None:
    """Launch the kernel; arguments as in the op."""
    num_tiles, batch = table.tiles.shape[0], path.shape[0]
    # As even a share for each program as `_MAX_PROGRAMS` of them allow.
    tiles_per_program = max(1, triton.cdiv(num_tiles * batch, _MAX_PROGRAMS))
    compact_window_rows_kernel[triton.cdiv(num_tiles, tiles_per_program), batch](
        table.tiles,
        slots,
        path,
        num_tiles,
        max_depth,
        table.tiles.stride(0),
        slots.stride(0),
        slots.stride(1),
        path.stride(0),
        WORD=_WORDS[table.word_bytes],
        BLOCK_PATH=triton.next_power_of_2(max_depth),
        BLOCK_DEPTHS=_BLOCK_DEPTHS,
        BLOCK_WORDS=table.tile_words,
        RUN=table.run_words,
        num_warps=_NUM_WARPS,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    signature = dict.fromkeys(
        (name for name in compact_window_rows_kernel.arg_names if name.islower()), "i32"
    )
    signature |= {"tiles_ptr": "*i64:16", "slots_ptr": "*i32:16", "path_ptr": "*i32:16"}
    constexprs = {"BLOCK_DEPTHS": _BLOCK_DEPTHS, "BLOCK_WORDS": 256, "RUN": 32}
    return [
        (
            compact_window_rows_kernel,
            signature,
            constexprs | {"WORD": word, "BLOCK_PATH": block_path},
            {"num_warps": _NUM_WARPS},
        )
        for word, block_path in ((tl.int64, 8), (tl.int64, 128), (tl.int16, 32))
    ]
