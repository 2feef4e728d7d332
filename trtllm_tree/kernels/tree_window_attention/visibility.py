"""Which columns each row of a tile sees, from the words of its ancestor mask.

Columns count from the window's start; negative ones are the tail of the prefix. It must not know keys or pages.
"""

from __future__ import annotations

from trtllm_tree.kernels._triton import bit_or, tl, triton


@triton.jit
def mask_word(mask_ptr, start, window, row_valid):
    """The word that holds the window columns among the 32 from `start` on, shifted so that the first is bit 0."""
    first = tl.maximum(start, 0)
    # As vectors: newer interpreters take `vector & scalar` for an integer.
    none = mask_ptr.to(tl.int64) * 0
    has_columns = none + start > -32
    in_window = none + first < window
    word = tl.load(mask_ptr + first // 64, mask=row_valid & has_columns & in_window, other=0)
    return (word >> (first & 63)).to(tl.int32)


@triton.jit
def row_bits(word, start, window, tail_start, ALIGN: tl.constexpr):
    """What each row sees of the 32 columns from `start` on, a multiple of ALIGN; negative columns are the tail."""
    inside = tl.minimum(tl.maximum(window - tl.maximum(start, 0), 0), 32)
    word &= tl.where(inside == 32, -1, (1 << (inside & 31)) - 1)
    hidden = tail_start - start
    tail = tl.where(hidden < 32, -1 << tl.minimum(tl.maximum(hidden, 0), 31), 0)
    if ALIGN == 32:
        return tl.where(start < 0, tail, word)
    # 16 of the tail and 16 of the window may lie side by side.
    num_before = tl.maximum(-start, 0)
    in_tail = tl.where(num_before >= 32, -1, (1 << (num_before & 31)) - 1)
    return (tail & in_tail) | tl.where(num_before >= 32, 0, word << (num_before & 31))


@triton.jit
def window_reach(mask_ptr, row_valid, window, WORDS: tl.constexpr):
    """One behind the highest window column that a row of the tile sees."""
    bit = tl.arange(0, 64)
    end = 0
    for word in tl.static_range(WORDS):
        seen = tl.reduce(tl.load(mask_ptr + word, mask=row_valid, other=0), 0, bit_or)
        columns = tl.where(((seen >> bit.to(tl.int64)) & 1) != 0, word * 64 + bit + 1, 0)
        end = tl.maximum(end, tl.max(columns, 0))
    return tl.minimum(end, window)


@triton.jit
def visible_columns(low, high, BLOCK_N: tl.constexpr):
    """Per row and column of a block whether the row sees it, and per column whether any row does.

    From the bits of the block's two halves: a whole tile of 64-bit shifts would cost registers.
    """
    n = tl.arange(0, BLOCK_N)
    bits = low[:, None]
    packed = low.to(tl.int64) & 0xFFFFFFFF
    if BLOCK_N > 32:
        bits = tl.where((n < 32)[None, :], bits, high[:, None])
        packed |= high.to(tl.int64) << 32
    visible = (bits & (1 << (n & 31))[None, :]) != 0
    seen = ((tl.reduce(packed, 0, bit_or) >> n) & 1) != 0
    return visible, seen
