"""Triton kernel of `compact_window_rows`: one launch for all regions, copying words over an address table.

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
_MAX_BLOCK_WORDS = 256


@triton.jit
def compact_window_rows_kernel(
    addresses_ptr,
    slots_ptr,
    path_ptr,
    max_depth,
    words_per_slot,
    page_stride,
    head_stride,
    token_stride,
    slots_stride_b,
    path_stride_b,
    PAGE_SIZE: tl.constexpr,
    WORDS_PER_ROW: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK_DEPTHS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Strides of the regions are in words."""
    word = tl.program_id(0) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    b = tl.program_id(1).to(tl.int64)
    region_ptr = tl.load(addresses_ptr + tl.program_id(2)).to(tl.pointer_type(WORD))
    column = (word // WORDS_PER_ROW).to(tl.int64) * head_stride + word % WORDS_PER_ROW
    for first in tl.range(1, max_depth, BLOCK_DEPTHS):
        depth = first + tl.arange(0, BLOCK_DEPTHS)
        source = tl.load(path_ptr + b * path_stride_b + depth, mask=depth < max_depth, other=-1)
        moves = (source >= 0) & (source != depth)
        if tl.max(moves.to(tl.int32)) > 0:
            from_slot = tl.load(slots_ptr + b * slots_stride_b + source, mask=moves, other=0).to(tl.int64)
            to_slot = tl.load(slots_ptr + b * slots_stride_b + depth, mask=moves, other=0).to(tl.int64)
            from_row = from_slot // PAGE_SIZE * page_stride + from_slot % PAGE_SIZE * token_stride
            to_row = to_slot // PAGE_SIZE * page_stride + to_slot % PAGE_SIZE * token_stride
            mask = moves[:, None] & (word < words_per_slot)[None, :]
            rows = tl.load(region_ptr + (from_row[:, None] + column[None, :]), mask=mask, other=0)
            # A row may be both source and target in this block: all threads read before any writes. Later
            # blocks read rows path[d] >= d only, which no earlier block wrote.
            tl.debug_barrier()
            tl.store(region_ptr + (to_row[:, None] + column[None, :]), rows, mask=mask)


def launch(table: RowTable, slots: torch.Tensor, path: torch.Tensor, *, max_depth: int) -> None:
    """Launch the kernel; arguments as in the op."""
    words_per_row = table.row_bytes // table.word_bytes
    words_per_slot = table.num_heads * words_per_row
    block_words = min(_MAX_BLOCK_WORDS, triton.next_power_of_2(words_per_slot))
    grid = (triton.cdiv(words_per_slot, block_words), path.shape[0], len(table.regions))
    compact_window_rows_kernel[grid](
        table.addresses,
        slots,
        path,
        max_depth,
        words_per_slot,
        table.page_stride // table.word_bytes,
        table.head_stride // table.word_bytes,
        table.token_stride // table.word_bytes,
        slots.stride(0),
        path.stride(0),
        PAGE_SIZE=table.page_size,
        WORDS_PER_ROW=words_per_row,
        WORD=_WORDS[table.word_bytes],
        BLOCK_DEPTHS=_BLOCK_DEPTHS,
        BLOCK_WORDS=block_words,
        num_warps=4,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    signature = dict.fromkeys(
        (name for name in compact_window_rows_kernel.arg_names if name.islower()), "i32"
    )
    signature |= {"addresses_ptr": "*i64:16", "slots_ptr": "*i32:16", "path_ptr": "*i32:16"}
    signature |= dict.fromkeys(("page_stride", "head_stride", "token_stride", "words_per_slot"), "i32:16")
    constexprs = {"PAGE_SIZE": 32, "WORDS_PER_ROW": 32, "BLOCK_DEPTHS": _BLOCK_DEPTHS, "BLOCK_WORDS": 256}
    return [
        (compact_window_rows_kernel, signature, constexprs | {"WORD": word}, {"num_warps": 4})
        for word in (tl.int64, tl.int16)
    ]
