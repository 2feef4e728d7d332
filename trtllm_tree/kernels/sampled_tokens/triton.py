"""sampled_tokens in Triton: one pass of tiles, as many programs a row; a filtered row's last one then searches.

A plain row's draw is a maximum, so its tiles meet in one number in any order, as an argmax does. A row with top-k,
top-p or min-p meets in its peak instead, and the last program to finish goes on alone: it finds the last kept
logit two bits a pass, by the count or the mass of the ids above, and draws among the kept.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton

_TILE = 4096
_BLOCK = 2048
_NUM_WARPS = 8
# Low bits of a logit's float32 that tell nothing; even, since the search takes two bits a pass.
_UNUSED_BITS = {torch.float32: 0, torch.float16: 12, torch.bfloat16: 16}


@triton.jit
def _rank(value):
    """int32 that orders as float32 does: -0.0 equals 0.0, and NaN beats all."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    # Negative floats order backwards as integers: flip all but their sign.
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _value(rank):
    """The float32 of a rank that is not NaN's."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key(rank, index):
    """int64 that orders by rank, then by lower index; above 0, which is what an unused workspace holds."""
    return ((rank.to(tl.int64) + 0x80000000) << 31) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _gumbel(word):
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
def _noise(seed, position, start, SIZE: tl.constexpr):
    """Noise float32 [SIZE] of the ids from `start`, a multiple of four."""
    group = start // 4 + tl.arange(0, SIZE // 4)
    zero = tl.zeros([SIZE // 4], tl.int32)
    low, high = zero + position.to(tl.int32), zero + (position >> 32).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, group, low, high, zero)
    return _gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)).to(tl.int32, bitcast=True))


@triton.jit
def _mass(value, peak, temperature):
    """exp((value - peak) / temperature) in units of 2**-40: a sum of integers is the same in any order."""
    # Infinities included: one that equals the peak is at no distance from it.
    at_peak = value == peak
    distance = tl.where(at_peak, 0.0, value) - tl.where(at_peak, 0.0, peak)
    # Bounded so that nothing overflows; what lies so far below the peak has no mass.
    weight = tl.exp(tl.maximum(distance, -100.0 * temperature) / temperature)
    return (weight * 1099511627776.0).to(tl.int64)


@triton.jit
def _block(logits_ptr, start, vocab_size, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Ids, logits and search keys [BLOCK]; padding has a key below every logit's."""
    index = start + tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    key = tl.where(index < vocab_size, _rank(value) >> UNUSED_BITS, -(1 << (31 - UNUSED_BITS)))
    return index, value, key


@triton.jit
def _key_mass(key, peak, temperature, UNUSED_BITS: tl.constexpr):
    """Mass of one id of this search key."""
    rank = (key << UNUSED_BITS) | tl.where(key < 0, (1 << UNUSED_BITS) - 1, 0)
    return _mass(_value(rank), peak, temperature)


@triton.jit
def _boundary(
    logits_ptr,
    vocab_size,
    peak,
    temperature,
    needed,
    BY_MASS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest key with less than `needed` (ids, or mass) above it, and how many ids of it that takes."""
    threshold = tl.full([], -(1 << (31 - UNUSED_BITS)), tl.int32)
    step = tl.full([], 1 << (30 - UNUSED_BITS), tl.int32)
    above = tl.zeros([], tl.int64)
    for _ in range((32 - UNUSED_BITS) // 2):
        first = tl.zeros([BLOCK], tl.int64)
        second = tl.zeros([BLOCK], tl.int64)
        third = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            _index, value, key = _block(logits_ptr, start, vocab_size, UNUSED_BITS, BLOCK)
            weight = _mass(value, peak, temperature) if BY_MASS else tl.full([BLOCK], 1, tl.int64)
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
        each = tl.maximum(each, _key_mass(threshold, peak, temperature, UNUSED_BITS))
    return threshold, (needed - above + each - 1) // each


@triton.jit
def _kept_mass(
    logits_ptr,
    vocab_size,
    peak,
    temperature,
    threshold,
    num_ties,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass of the ids above the threshold and of `num_ties` at it."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        _index, value, key = _block(logits_ptr, start, vocab_size, UNUSED_BITS, BLOCK)
        total += tl.where(key > threshold, _mass(value, peak, temperature), 0)
    ties = tl.zeros([], tl.int64)
    # Without top-k there are none, and the threshold is no logit's key.
    if num_ties > 0:
        ties = num_ties * _key_mass(threshold, peak, temperature, UNUSED_BITS)
    return tl.sum(total, axis=0) + ties


@triton.jit
def _filtered_draw(
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
    """The token of one row whose largest logit is `peak`. Kept are all keys above a threshold and some at it."""
    threshold = tl.full([], -(1 << (31 - UNUSED_BITS)), tl.int32)
    num_ties = tl.zeros([], tl.int64)
    if (top_k > 0) & (top_k < vocab_size):
        threshold, num_ties = _boundary(
            logits_ptr, vocab_size, peak, temperature, top_k.to(tl.int64), False, UNUSED_BITS, BLOCK
        )
    if top_p < 1.0:
        total = _kept_mass(logits_ptr, vocab_size, peak, temperature, threshold, num_ties, UNUSED_BITS, BLOCK)
        # In float64, which rounds alike everywhere. Ids at the boundary have equal mass, so this keeps no more of
        # them than top-k does.
        needed = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        threshold, num_ties = _boundary(
            logits_ptr, vocab_size, peak, temperature, needed, True, UNUSED_BITS, BLOCK
        )
    cut = tl.full([], float("-inf"), tl.float32)
    if min_p > 0.0:
        cut = peak + temperature * tl.log(min_p)

    num_seen = tl.zeros([], tl.int64)
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        index, value, key = _block(logits_ptr, start, vocab_size, UNUSED_BITS, BLOCK)
        is_tie = key == threshold
        order = num_seen + tl.cumsum(is_tie.to(tl.int32), axis=0)
        num_seen += tl.sum(is_tie.to(tl.int32), axis=0)
        kept = (key > threshold) | (is_tie & (order <= num_ties))
        kept = kept & (value >= cut) & (index < vocab_size)
        score = value + temperature * _noise(seed, position, start, BLOCK)
        best = tl.maximum(best, tl.where(kept, _key(_rank(score), index), 0))
    return 0x7FFFFFFF - (tl.max(best, axis=0) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def sampled_tokens_kernel(
    logits_ptr,
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    tokens_ptr,
    workspace_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    UNUSED_BITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best_ptr = workspace_ptr + 2 * row
    logits_ptr += row * row_stride
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    temperature = tl.load(temperatures_ptr + row)
    top_k, top_p, min_p = tl.load(top_ks_ptr + row), tl.load(top_ps_ptr + row), tl.load(min_ps_ptr + row)
    is_filtered = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)
    draws = temperature > 0.0

    start = tl.program_id(1) * TILE
    index = start + tl.arange(0, TILE)
    # Padding has the highest ids of its row, so that it loses even among nothing but -inf.
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    if draws & (is_filtered == 0):
        value += temperature * _noise(seed, position, start, TILE)
    rank = _rank(value)
    peak = tl.max(rank, axis=0)
    token = tl.min(tl.where(rank == peak, index, 0x7FFFFFFF), axis=0)

    # One thread does all three, so the count publishes the maximum, and whoever counts last sees all of them.
    tl.atomic_max(best_ptr, _key(peak, token), sem="relaxed")
    if tl.atomic_add(best_ptr + 1, 1, sem="acq_rel", scope="gpu") == num_tiles - 1:
        best = tl.atomic_xchg(best_ptr, tl.zeros([], tl.int64), sem="relaxed")
        tl.store(best_ptr + 1, 0)
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        peak = ((best >> 31) - 0x80000000).to(tl.int32)
        if peak == 0x7FFFFFFF:
            token = -1
        elif draws & is_filtered:
            token = _filtered_draw(
                logits_ptr,
                vocab_size,
                _value(peak),
                seed,
                position,
                temperature,
                top_k,
                top_p,
                min_p,
                UNUSED_BITS,
                BLOCK,
            )
        tl.store(tokens_ptr + row, token)


def launch(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    tokens: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """Fill `tokens` int32 [M]; arguments as in the op."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    padded = max(16, triton.next_power_of_2(vocab_size))
    tile = min(_TILE, padded)
    num_tiles = triton.cdiv(vocab_size, tile)
    sampled_tokens_kernel[(num_rows, num_tiles)](
        logits,
        seeds,
        positions,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        tokens,
        workspace,
        logits.stride(0),
        vocab_size,
        num_tiles,
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        TILE=tile,
        BLOCK=min(_BLOCK, padded),
        num_warps=_NUM_WARPS,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test: V = 128256 aligned, and a strided odd one."""
    types = {"seeds": "*i64", "positions": "*i64", "top_ks": "*i32", "tokens": "*i32", "workspace": "*i64"}
    specs = []
    for dtype, name, aligned in (
        (torch.bfloat16, "bf16", ":16"),
        (torch.float16, "fp16", ":16"),
        (torch.float32, "fp32", ":16"),
        (torch.float32, "fp32", ""),
    ):
        names = [arg.removesuffix("_ptr") for arg in sampled_tokens_kernel.arg_names if arg.endswith("_ptr")]
        signature = {f"{arg}_ptr": f"{types.get(arg, '*fp32')}:16" for arg in names}
        signature["logits_ptr"] = f"*{name}{aligned}"
        signature |= {"row_stride": f"i32{aligned}", "vocab_size": f"i32{aligned}", "num_tiles": "i32"}
        constexprs = {"UNUSED_BITS": _UNUSED_BITS[dtype], "TILE": _TILE, "BLOCK": _BLOCK}
        specs.append((sampled_tokens_kernel, signature, constexprs, {"num_warps": _NUM_WARPS}))
    return specs
