"""How one program draws from a row that is filtered, after every tile of the row has been seen once.

Three ways to the same token, by what the row asks for. Top-p and min-p alone: the best score of the whole row is the
draw unless it lies behind what is kept, and then the best of what lies before it is tried. A small top-k: its ids are
few, so they are gathered and searched in registers. Any other top-k: the last kept logit is searched two bits a pass.
It must not know how rows are spread over programs.
"""

from __future__ import annotations

from trtllm_tree.kernels._row_law import (
    best_key,
    kept_range,
    load_block,
    mass_of,
    noise,
    noise_at,
    rank_of,
    value_of,
)
from trtllm_tree.kernels._triton import tl, triton


@triton.jit
def _cut(peak, temperature, min_p):
    """The lowest logit that min-p keeps; never above the peak, which stays."""
    cut = tl.full([], float("-inf"), tl.float32)
    if min_p > 0.0:
        cut = tl.minimum(peak + temperature * tl.log(min_p), peak)
    return cut


@triton.jit
def _total_and_before(logits_ptr, vocab_size, peak, temperature, rank, token, BLOCK: tl.constexpr):
    """Mass of the row, and of the ids that come before `token`, whose logit has this rank."""
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
def _best_before(logits_ptr, vocab_size, seed, position, temperature, cut, rank, token, BLOCK: tl.constexpr):
    """The best score of the ids that come before `token` and are not below the cut."""
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        other = rank_of(value)
        is_before = (other > rank) | ((other == rank) & (index < token))
        is_before = is_before & (value >= cut) & (index < vocab_size)
        score = value + temperature * noise(seed, position, start, BLOCK)
        best = tl.maximum(best, tl.where(is_before, best_key(rank_of(score), index), 0))
    return 0x7FFFFFFF - (tl.max(best, axis=0) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def nucleus_draw(
    logits_ptr, vocab_size, peak, token, seed, position, temperature, top_p, min_p, BLOCK: tl.constexpr
):
    """The token of a row without top-k, given the one with the best score of all, `token`.

    What is kept is a beginning of the ids in their order. So if a token is not kept, none behind it is, and the best
    of those before it comes next; that the first of all is kept ends this.
    """
    cut = _cut(peak, temperature, min_p)
    is_kept = token < 0
    while is_kept == 0:
        value = tl.load(logits_ptr + token).to(tl.float32)
        rank = rank_of(value)
        needed, before = tl.full([], 1, tl.int64), tl.zeros([], tl.int64)
        if top_p < 1.0:
            total, before = _total_and_before(logits_ptr, vocab_size, peak, temperature, rank, token, BLOCK)
            # In float64, which rounds alike everywhere.
            needed = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        is_kept = (before < needed) & (value >= cut)
        if is_kept == 0:
            token = _best_before(logits_ptr, vocab_size, seed, position, temperature, cut, rank, token, BLOCK)
    return token


@triton.jit
def _reaching(keys, weights, needed):
    """The largest number that keys >= 0 of this weight reach, all keys int64; 0 if all of them weigh less."""
    threshold = tl.zeros([], tl.int64)
    bit = tl.full([], 1 << 62, tl.int64)
    for _ in range(63):
        reached = tl.sum(tl.where(keys >= (threshold | bit), weights, 0), axis=0) >= needed
        threshold = tl.where(reached, threshold | bit, threshold)
        bit = bit >> 1
    return threshold


@triton.jit
def _likely_rank(logits_ptr, vocab_size, top_k, FEW: tl.constexpr):
    """A rank that at least `top_k` ids reach and hardly more than needed, by FEW ids spread over the row.

    With it, how many ids are expected to reach it.
    """
    picked = tl.arange(0, FEW)
    index = (picked.to(tl.int64) * vocab_size) // FEW
    value = tl.load(logits_ptr + index).to(tl.float32)
    share = top_k.to(tl.float32) * FEW / vocab_size
    # So many picked ids are among the first top_k, give or take a few square roots.
    place = (share + 3.0 * tl.sqrt(share) + 4.0).to(tl.int32)
    ordered = rank_of(value).to(tl.int64) + 0x80000000
    key = _reaching(ordered, tl.full([FEW], 1, tl.int64), tl.minimum(place, FEW).to(tl.int64))
    return (key - 0x80000000).to(tl.int32), place.to(tl.float32) * vocab_size / FEW


@triton.jit
def _gathered_draw(
    logits_ptr,
    vocab_size,
    peak,
    seed,
    position,
    temperature,
    top_k,
    top_p,
    min_p,
    counter_ptr,
    few_ptr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    """The token, if between `top_k` and FEW ids reach a likely rank; else -1."""
    rank, expected = tl.full([], -0x80000000, tl.int32), tl.zeros([], tl.float32)
    if vocab_size > FEW:
        rank, expected = _likely_rank(logits_ptr, vocab_size, top_k, FEW)
    token = tl.full([], -1, tl.int32)
    if expected < 0.75 * FEW:
        for start in range(0, vocab_size, BLOCK):
            index = start + tl.arange(0, BLOCK)
            value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
            other = rank_of(value)
            reaches = (other >= rank) & (index < vocab_size)
            # In any order: nothing below depends on it.
            place = tl.atomic_add(counter_ptr + index * 0, 1, mask=reaches, sem="relaxed", scope="cta")
            tl.store(few_ptr + place, best_key(other, index), mask=reaches & (place < FEW))
        # Every thread's ids are counted and stored before any thread reads.
        tl.debug_barrier()
        count = tl.atomic_xchg(counter_ptr, tl.zeros([], tl.int64), sem="relaxed")
        if (count >= top_k) & (count <= FEW):
            token = _few_draw(few_ptr, count, peak, seed, position, temperature, top_k, top_p, min_p, FEW)
    return token


@triton.jit
def _few_draw(few_ptr, count, peak, seed, position, temperature, top_k, top_p, min_p, FEW: tl.constexpr):
    """The token of a row whose first `count` ids are given in any order; the first `top_k` of them are kept."""
    order = tl.arange(0, FEW)
    keys = tl.load(few_ptr + order, mask=order < count, other=0)
    index = 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
    # No two keys are equal, so no more than top_k reach the last one's.
    kept = keys >= _reaching(keys, (order < count).to(tl.int64), top_k.to(tl.int64))
    value = tl.where(kept, value_of(((keys >> 31) - 0x80000000).to(tl.int32)), float("-inf"))
    if top_p < 1.0:
        mass = tl.where(kept, mass_of(value, peak, temperature), 0)
        total = tl.sum(mass, axis=0).to(tl.float64)
        needed = tl.maximum(tl.ceil(top_p.to(tl.float64) * total).to(tl.int64), 1)
        kept = kept & (keys >= _reaching(keys, mass, needed))
    kept = kept & (value >= _cut(peak, temperature, min_p))
    score = value + temperature * noise_at(seed, position, index)
    best = tl.max(tl.where(kept, best_key(rank_of(score), index), 0), axis=0)
    return 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _searched_draw(
    logits_ptr,
    vocab_size,
    peak,
    seed,
    position,
    temperature,
    top_k,
    top_p,
    min_p,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of any row, by the last logit that it keeps."""
    threshold, num_ties, cut = kept_range(
        logits_ptr, vocab_size, peak, temperature, top_k, top_p, min_p, UNUSED_BITS, BLOCK
    )
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
    return 0x7FFFFFFF - (tl.max(best, axis=0) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def top_k_draw(
    logits_ptr,
    vocab_size,
    peak,
    seed,
    position,
    temperature,
    top_k,
    top_p,
    min_p,
    may_gather,
    counter_ptr,
    few_ptr,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    """The token of a row with top-k. If it `may_gather`, by `counter_ptr` (0, and 0 again) into `few_ptr` [FEW]."""
    token = tl.full([], -1, tl.int32)
    if may_gather:
        token = _gathered_draw(
            logits_ptr,
            vocab_size,
            peak,
            seed,
            position,
            temperature,
            top_k,
            top_p,
            min_p,
            counter_ptr,
            few_ptr,
            BLOCK,
            FEW,
        )
    if token < 0:
        token = _searched_draw(
            logits_ptr,
            vocab_size,
            peak,
            seed,
            position,
            temperature,
            top_k,
            top_p,
            min_p,
            UNUSED_BITS,
            BLOCK,
        )
    return token
