"""What a row's law keeps, how much that is, and a draw from what of it is no child's token, by one program.

Where the first ids were gathered, that takes no more of the row; else the row is searched and then streamed once more.
It must not know how children are tried.

Several arguments come as one: `row` is (address, vocabulary size, largest logit), `law` (temperature, top_k, top_p,
min_p), and `draw` (seed, position). `children` int32 holds the children's tokens, and the largest int32 elsewhere.
"""

from __future__ import annotations

from trtllm_tree.kernels._few import are_enough, kept_of_few
from trtllm_tree.kernels._row_law import (
    best_key,
    cut_of,
    id_of_best,
    kept_range,
    load_block,
    mass_of,
    noise,
    noise_at,
    rank_of,
)
from trtllm_tree.kernels._triton import tl, triton


@triton.jit
def _few_draw(
    few_ptr,
    count,
    peak,
    law,
    draw,
    children,
    UNUSED_BITS: tl.constexpr,
    ID_BITS: tl.constexpr,
    FEW: tl.constexpr,
):
    """Mass of what is kept, where it ends, and a draw from what is kept and no child, by the gathered ids."""
    temperature, _top_k, _top_p, _min_p = law
    seed, position = draw
    kept, index, value, mass, edge = kept_of_few(few_ptr, count, peak, law, UNUSED_BITS, ID_BITS, FEW)
    total = tl.sum(tl.where(kept, mass, 0), axis=0)
    child = tl.min(children, axis=0)
    while child < 0x7FFFFFFF:
        kept = kept & (index != child)
        child = tl.min(tl.where(children > child, children, 0x7FFFFFFF), axis=0)
    score = value + temperature * noise_at(seed, position, index)
    best = tl.max(tl.where(kept, best_key(rank_of(score), index), 0), axis=0)
    return total, edge, id_of_best(best)


@triton.jit
def _searched_draw(row, law, draw, children, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The same of any row, by the last logit that it keeps."""
    logits_ptr, vocab_size, peak = row
    temperature, _top_k, _top_p, min_p = law
    seed, position = draw
    threshold, num_ties = kept_range(row, law, UNUSED_BITS, BLOCK)
    cut = cut_of(peak, temperature, min_p)
    num_seen = tl.zeros([], tl.int64)
    last_tie = tl.full([], -1, tl.int32)
    total = tl.zeros([BLOCK], tl.int64)
    best = tl.zeros([BLOCK], tl.int64)
    child = tl.min(children, axis=0)
    for start in range(0, vocab_size, BLOCK):
        index, value, key = load_block(logits_ptr, start, vocab_size, UNUSED_BITS, BLOCK)
        kept = key > threshold
        if num_ties > 0:
            is_tie = key == threshold
            order = num_seen + tl.cumsum(is_tie.to(tl.int32), axis=0)
            num_seen += tl.sum(is_tie.to(tl.int32), axis=0)
            is_tie = is_tie & (order <= num_ties)
            last_tie = tl.maximum(last_tie, tl.max(tl.where(is_tie, index, -1), axis=0))
            kept = kept | is_tie
        kept = kept & (value >= cut) & (index < vocab_size)
        total += tl.where(kept, mass_of(value, peak, temperature), 0)
        # Children in the order of their tokens, so that each is met in its own block and nowhere else.
        while child < start + BLOCK:
            kept = kept & (index != child)
            child = tl.min(tl.where(children > child, children, 0x7FFFFFFF), axis=0)
        score = value + temperature * noise(seed, position, start, BLOCK)
        best = tl.maximum(best, tl.where(kept, best_key(rank_of(score), index), 0))
    return tl.sum(total, axis=0), (threshold, last_tie), id_of_best(tl.max(best, axis=0))


@triton.jit
def kept_draw(
    row,
    law,
    draw,
    children,
    few_ptr,
    count,
    UNUSED_BITS: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    """Mass of what is kept, where it ends, and a draw from what is kept and no child; `count` ids were gathered."""
    _logits_ptr, _vocab_size, peak = row
    temperature, top_k, _top_p, min_p = law
    if are_enough(count, top_k, FEW):
        total, edge, token = _few_draw(few_ptr, count, peak, law, draw, children, UNUSED_BITS, ID_BITS, FEW)
    else:
        total, edge, token = _searched_draw(row, law, draw, children, UNUSED_BITS, BLOCK)
    threshold, last_tie = edge
    return total, (threshold, last_tie, cut_of(peak, temperature, min_p)), token


@triton.jit
def is_kept(key, value, index, kept):
    """Whether ids are kept by what `kept_draw` said: from which key on, the last id of that key, the lowest logit."""
    threshold, last_tie, cut = kept
    return ((key > threshold) | ((key == threshold) & (index <= last_tie))) & (value >= cut)
