"""How one program draws from a row that is filtered, after every tile of the row has been seen once.

Three ways to the same token, by what the row asks for. Top-p and min-p alone: the best score of the whole row is the
draw unless it lies behind what is kept, and then the best of what lies before it is tried. A small top-k: its ids are
few, and the tiles have gathered them. Any other top-k: the last kept logit is searched two bits a pass. It must not
know how rows are spread over programs.

Several arguments come as one: `row` is (address, vocabulary size, largest logit), `law` (temperature, top_k, top_p,
min_p), and `draw` (seed, position).
"""

from __future__ import annotations

from trtllm_tree.kernels._few import are_enough, kept_of_few
from trtllm_tree.kernels._row_law import (
    best_key,
    cut_of,
    id_of_best,
    kept_range,
    load_block,
    mass_needed,
    mass_of,
    noise,
    noise_at,
    rank_of,
)
from trtllm_tree.kernels._triton import tl, triton


@triton.jit
def _total_and_before(row, temperature, rank, token, BLOCK: tl.constexpr):
    """Mass of the row, and of the ids that come before `token`, whose logit has this rank."""
    logits_ptr, vocab_size, peak = row
    total = tl.zeros([BLOCK], tl.int64)
    before = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        mass = tl.where(index < vocab_size, mass_of(value, peak, temperature), 0)
        other = rank_of(value)
        total += mass
        before += tl.where((other > rank) | ((other == rank) & (index < token)), mass, 0)
    return tl.sum(total, axis=0), tl.sum(before, axis=0)


@triton.jit
def _best_before(row, temperature, draw, cut, rank, token, BLOCK: tl.constexpr):
    """The id with the best score of those that come before `token` and are not below the cut."""
    logits_ptr, vocab_size, _peak = row
    seed, position = draw
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        other = rank_of(value)
        is_before = (other > rank) | ((other == rank) & (index < token))
        is_before = is_before & (value >= cut) & (index < vocab_size)
        score = value + temperature * noise(seed, position, start, BLOCK)
        best = tl.maximum(best, tl.where(is_before, best_key(rank_of(score), index), 0))
    return id_of_best(tl.max(best, axis=0))


@triton.jit
def nucleus_draw(row, law, draw, token, BLOCK: tl.constexpr):
    """The token of a row without top-k, given the one with the best score of all, `token`.

    What is kept is a beginning of the ids in their order. So if a token is not kept, none behind it is, and the best
    of those before it comes next; that the first of all is kept ends this.
    """
    logits_ptr, _vocab_size, peak = row
    temperature, _top_k, top_p, min_p = law
    cut = cut_of(peak, temperature, min_p)
    is_kept = token < 0
    while is_kept == 0:
        value = tl.load(logits_ptr + token).to(tl.float32)
        rank = rank_of(value)
        needed, before = tl.full([], 1, tl.int64), tl.zeros([], tl.int64)
        if top_p < 1.0:
            total, before = _total_and_before(row, temperature, rank, token, BLOCK)
            needed = mass_needed(top_p, total)
        is_kept = (before < needed) & (value >= cut)
        if is_kept == 0:
            token = _best_before(row, temperature, draw, cut, rank, token, BLOCK)
    return token


@triton.jit
def _few_draw(
    few_ptr,
    count,
    peak,
    law,
    draw,
    UNUSED_BITS: tl.constexpr,
    ID_BITS: tl.constexpr,
    FEW: tl.constexpr,
):
    """The token of a row whose first ids were gathered."""
    temperature, _top_k, _top_p, _min_p = law
    seed, position = draw
    kept, index, value, _mass, _edge = kept_of_few(few_ptr, count, peak, law, UNUSED_BITS, ID_BITS, FEW)
    score = value + temperature * noise_at(seed, position, index)
    return id_of_best(tl.max(tl.where(kept, best_key(rank_of(score), index), 0), axis=0))


@triton.jit
def _searched_draw(row, law, draw, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The token of any row, by the last logit that it keeps."""
    logits_ptr, vocab_size, peak = row
    temperature, _top_k, _top_p, min_p = law
    seed, position = draw
    threshold, num_ties = kept_range(row, law, UNUSED_BITS, BLOCK)
    cut = cut_of(peak, temperature, min_p)
    num_seen = tl.zeros([], tl.int64)
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        index, value, key = load_block(logits_ptr, start, vocab_size, UNUSED_BITS, BLOCK)
        is_tie = key == threshold
        order = num_seen + tl.cumsum(is_tie.to(tl.int32), axis=0)
        num_seen += tl.sum(is_tie.to(tl.int32), axis=0)
        kept = (key > threshold) | (is_tie & (order <= num_ties))
        kept = kept & (value >= cut) & (index < vocab_size)
        score = value + temperature * noise(seed, position, start, BLOCK)
        best = tl.maximum(best, tl.where(kept, best_key(rank_of(score), index), 0))
    return id_of_best(tl.max(best, axis=0))


@triton.jit
def top_k_draw(
    row,
    law,
    draw,
    few_ptr,
    count,
    UNUSED_BITS: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    """The token of a row with top-k, `count` ids of which were gathered."""
    _logits_ptr, _vocab_size, peak = row
    _temperature, top_k, _top_p, _min_p = law
    if are_enough(count, top_k, FEW):
        token = _few_draw(few_ptr, count, peak, law, draw, UNUSED_BITS, ID_BITS, FEW)
    else:
        token = _searched_draw(row, law, draw, UNUSED_BITS, BLOCK)
    return token
