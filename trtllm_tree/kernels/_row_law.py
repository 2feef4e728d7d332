"""The law of a row's next token in Triton: what all kernels that draw share. Noise, masses, and what a row keeps.

Owns the definitions that `sampled_tokens` states; `_row_law_torch` has them in torch. It must not know what is drawn.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton

# Low bits of a logit's float32 that tell nothing; even, since the search takes two bits a pass.
UNUSED_LOGIT_BITS = {torch.float32: 0, torch.float16: 12, torch.bfloat16: 16}


@triton.jit
def rank_of(value):
    """int32 that orders as float32 does: -0.0 equals 0.0, and NaN beats all."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    # Negative floats order backwards as integers: flip all but their sign.
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def value_of(rank):
    """The float32 of a rank that is not NaN's."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_key(rank, index):
    """int64 that orders by rank, then by lower index; above 0, which is what an unused workspace holds."""
    return ((rank.to(tl.int64) + 0x80000000) << 31) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def id_of_best(key):
    """The id of a `best_key`."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def rank_of_best(key):
    """The rank of a `best_key`."""
    return ((key >> 31) - 0x80000000).to(tl.int32)


@triton.jit
def gumbel(word):
    """-log(-log(u)) with u = (word + 1/2) / 2**32; word int32, its bits taken as unsigned.

    The draw is decided where u is close to 1, so 1 - u is made from the word itself and not by subtraction.
    """
    upper = word < 0
    distance = (tl.where(upper, ~word, word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.where(upper, 1.0 - distance, distance)
    minus_log = -tl.log(u)
    # -log1p(-distance): -log(u) / (1 - u) hardly depends on how u was rounded.
    gap = 1.0 - u
    exact = tl.where(gap == 0.0, distance, minus_log * (distance / tl.where(gap == 0.0, 1.0, gap)))
    return -tl.log(tl.where(upper, exact, minus_log))


@triton.jit
def noise(seed, position, start, SIZE: tl.constexpr):
    """Noise float32 [SIZE] of the ids from `start`, a multiple of four."""
    group = start // 4 + tl.arange(0, SIZE // 4)
    zero = tl.zeros([SIZE // 4], tl.int32)
    low, high = zero + position.to(tl.int32), zero + (position >> 32).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, group, low, high, zero)
    return gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)).to(tl.int32, bitcast=True))


@triton.jit
def noise_at(seed, position, index):
    """Noise float32 of int32 `index`, any ids."""
    zero = index * 0
    low, high = zero + position.to(tl.int32), zero + (position >> 32).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, index // 4, low, high, zero)
    word = index % 4
    even, odd = tl.where(word == 0, w0, w2), tl.where(word == 1, w1, w3)
    return gumbel(tl.where(word % 2 == 0, even, odd).to(tl.int32, bitcast=True))


@triton.jit
def mass_of(value, peak, temperature):
    """exp((value - peak) / temperature) in units of 2**-40: a sum of integers is the same in any order."""
    # Infinities included: one that equals the peak is at no distance from it.
    at_peak = value == peak
    distance = tl.where(at_peak, 0.0, value) - tl.where(at_peak, 0.0, peak)
    # Bounded so that nothing overflows; what lies so far below the peak has no mass.
    weight = tl.exp(tl.maximum(distance, -100.0 * temperature) / temperature)
    return (weight * 1099511627776.0).to(tl.int64)


@triton.jit
def load_block(logits_ptr, start, vocab_size, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Ids, logits and search keys [BLOCK]; padding has a key below every logit's."""
    index = start + tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    key = tl.where(index < vocab_size, rank_of(value) >> UNUSED_BITS, -(1 << (31 - UNUSED_BITS)))
    return index, value, key


@triton.jit
def value_of_key(key, UNUSED_BITS: tl.constexpr):
    """The float32 of a search key that is not NaN's."""
    return value_of((key << UNUSED_BITS) | tl.where(key < 0, (1 << UNUSED_BITS) - 1, 0))


@triton.jit
def mass_needed(top_p, total):
    """How much of a total mass top-p keeps; in float64, which rounds alike everywhere."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def cut_of(peak, temperature, min_p):
    """The lowest logit that min-p keeps; never above the peak, which stays."""
    cut = tl.full([], float("-inf"), tl.float32)
    if min_p > 0.0:
        cut = tl.minimum(peak + temperature * tl.log(min_p), peak)
    return cut


@triton.jit
def boundary(row, temperature, needed, BY_MASS: tl.constexpr, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key with less than `needed` (ids, or mass) above it, and how many ids of it that takes."""
    logits_ptr, vocab_size, peak = row
    threshold = tl.full([], -(1 << (31 - UNUSED_BITS)), tl.int32)
    step = tl.full([], 1 << (30 - UNUSED_BITS), tl.int32)
    above = tl.zeros([], tl.int64)
    for _ in range((32 - UNUSED_BITS) // 2):
        first = tl.zeros([BLOCK], tl.int64)
        second = tl.zeros([BLOCK], tl.int64)
        third = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            _index, value, key = load_block(logits_ptr, start, vocab_size, UNUSED_BITS, BLOCK)
            weight = mass_of(value, peak, temperature) if BY_MASS else tl.full([BLOCK], 1, tl.int64)
            first += tl.where(key >= threshold + step, weight, 0)
            second += tl.where(key >= threshold + 2 * step, weight, 0)
            third += tl.where(key >= threshold + 3 * step, weight, 0)
        one, two, three = tl.sum(first, axis=0), tl.sum(second, axis=0), tl.sum(third, axis=0)
        digit = (one >= needed).to(tl.int32) + (two >= needed).to(tl.int32) + (three >= needed).to(tl.int32)
        # The sums fall from the first to the third: the largest that is not enough lies just above the new range.
        above = tl.maximum(above, tl.where(three < needed, three, 0))
        above = tl.maximum(above, tl.where(two < needed, two, 0))
        above = tl.maximum(above, tl.where(one < needed, one, 0))
        threshold += digit * step
        step = step >> 2
    each = tl.full([], 1, tl.int64)
    if BY_MASS:
        each = tl.maximum(each, mass_of(value_of_key(threshold, UNUSED_BITS), peak, temperature))
    return threshold, (needed - above + each - 1) // each


@triton.jit
def kept_mass(row, temperature, threshold, num_ties, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Mass of the ids above the threshold and of `num_ties` at it."""
    logits_ptr, vocab_size, peak = row
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        _index, value, key = load_block(logits_ptr, start, vocab_size, UNUSED_BITS, BLOCK)
        total += tl.where(key > threshold, mass_of(value, peak, temperature), 0)
    ties = tl.zeros([], tl.int64)
    # Without top-k there are none, and the threshold is no logit's key.
    if num_ties > 0:
        ties = num_ties * mass_of(value_of_key(threshold, UNUSED_BITS), peak, temperature)
    return tl.sum(total, axis=0) + ties


@triton.jit
def kept_range(row, law, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """What top-k and top-p keep of a row: keys above a threshold, and so many of the lowest ids at it.

    `row` is (address, vocabulary size, largest logit), `law` (temperature, top_k, top_p, min_p); so everywhere.
    """
    _logits_ptr, vocab_size, _peak = row
    temperature, top_k, top_p, _min_p = law
    threshold = tl.full([], -(1 << (31 - UNUSED_BITS)), tl.int32)
    num_ties = tl.zeros([], tl.int64)
    if (top_k > 0) & (top_k < vocab_size):
        threshold, num_ties = boundary(row, temperature, top_k.to(tl.int64), False, UNUSED_BITS, BLOCK)
    if top_p < 1.0:
        total = kept_mass(row, temperature, threshold, num_ties, UNUSED_BITS, BLOCK)
        # Ids at the boundary have equal mass, so this keeps no more of them than top-k does.
        threshold, num_ties = boundary(row, temperature, mass_needed(top_p, total), True, UNUSED_BITS, BLOCK)
    return threshold, num_ties


@triton.jit
def uniform(seed, position, index):
    """Numbers float64 in (0, 1), one for each of int32 `index`; the noise of ids has other counters."""
    zero = index * 0
    low, high = zero + position.to(tl.int32), zero + (position >> 32).to(tl.int32)
    w0, w1, _w2, _w3 = tl.philox(seed, index, low, high, zero + 1)
    first = w0.to(tl.uint32, bitcast=True).to(tl.int64)
    second = w1.to(tl.uint32, bitcast=True).to(tl.int64)
    return (((first << 20) | (second >> 12)).to(tl.float64) + 0.5) * 2.220446049250313e-16
