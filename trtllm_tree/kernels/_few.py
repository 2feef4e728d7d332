"""The first ids of a row with a small top-k: gathered in one pass over the row, and then kept or not in registers.

A few ids spread over the row tell a logit that at least `top_k` ids reach and hardly more than needed; what reaches it
is gathered, in any order, and all else is sure to be filtered out. Where too few or too many reach it, as among equal
logits, the row has to be searched instead.

Owns the likely logit, the gathered keys and what the parameters keep of them. It must not know what is drawn, nor how
rows are spread over programs.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._row_buffers import gathered_shape
from trtllm_tree.kernels._row_law import cut_of, mass_needed, mass_of, rank_of, value_of_key
from trtllm_tree.kernels._triton import tl, triton

_NUM_WARPS = 4


@triton.jit
def _last_needed(keys, weights, needed, NUM_BITS: tl.constexpr):
    """The largest of int64 keys such that those which are no less weigh `needed`; negative ones are not there.

    At most 2048 keys below 2**NUM_BITS of weights up to 2**40 each, which all together weigh enough.
    """
    # Weight and number in one sum: the search is over when one key is left, most often long before the last bit.
    weights = (weights << 12) | 1
    threshold, above = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    within = tl.sum((keys >= 0).to(tl.int64), axis=0)
    bit = tl.full([], 1 << (NUM_BITS - 1), tl.int64)
    while (bit > 0) & (within > 1):
        reaching = tl.sum(tl.where(keys >= (threshold | bit), weights, 0), axis=0)
        count = reaching & 4095
        if (reaching >> 12) >= needed:
            threshold = threshold | bit
            within = count - above
        else:
            within = within - (count - above)
            above = count
        bit = bit >> 1
    return tl.min(tl.where(keys >= threshold, keys, 0x7FFFFFFFFFFFFFFF), axis=0)


@triton.jit
def likely_rank_kernel(
    logits_ptr,
    temperatures_ptr,
    top_ks_ptr,
    ranks_ptr,
    row_stride,
    vocab_size,
    num_gathering,
    FEW: tl.constexpr,
):
    """Of each row the rank (int32) from which on it gathers: one that top_k ids are likely to reach, or NaN's."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks_ptr + row)
    gathers = (tl.load(temperatures_ptr + row) > 0.0) & (top_k > 0) & (top_k < vocab_size)
    rank = tl.full([], 0x7FFFFFFF, tl.int32)
    if gathers & (row < num_gathering):
        # So many picked ids are among the first top_k, give or take a few square roots.
        share = top_k.to(tl.float32) * FEW / vocab_size
        place = (share + 3.0 * tl.sqrt(share) + 4.0).to(tl.int32)
        if vocab_size <= FEW:
            rank = tl.full([], -0x80000000, tl.int32)
        elif place.to(tl.float32) * vocab_size < 0.75 * FEW * FEW:
            index = (tl.arange(0, FEW).to(tl.int64) * vocab_size) // FEW
            value = tl.load(logits_ptr + row * row_stride + index).to(tl.float32)
            # Half of a float's bits suffice: a rank below the exact one gathers a few ids more.
            upper = (rank_of(value) >> 16).to(tl.int64) + 0x8000
            upper = _last_needed(upper, tl.full([FEW], 1, tl.int64), place.to(tl.int64), 16)
            rank = ((upper - 0x8000) << 16).to(tl.int32)
    tl.store(ranks_ptr + row, rank)


@triton.jit
def _few_key(rank, index, UNUSED_BITS: tl.constexpr, ID_BITS: tl.constexpr):
    """int64 >= 0 that orders as ids do, by logit and then by lower id, in no more bits than both need."""
    search_key = (rank >> UNUSED_BITS).to(tl.int64) + (1 << (31 - UNUSED_BITS))
    return (search_key << ID_BITS) | ((1 << ID_BITS) - 1 - index).to(tl.int64)


@triton.jit
def _search_key(few_key, UNUSED_BITS: tl.constexpr, ID_BITS: tl.constexpr):
    """The part of it that the logit made."""
    return ((few_key >> ID_BITS) - (1 << (31 - UNUSED_BITS))).to(tl.int32)


@triton.jit
def _id(few_key, ID_BITS: tl.constexpr):
    """The part of it that the id made."""
    return ((1 << ID_BITS) - 1 - (few_key & ((1 << ID_BITS) - 1))).to(tl.int32)


@triton.jit
def append(
    few_ptr,
    count_ptr,
    rank,
    index,
    reaches,
    UNUSED_BITS: tl.constexpr,
    ID_BITS: tl.constexpr,
    FEW: tl.constexpr,
):
    """Add the ids that reach a row's likely rank to those that any of its programs gathered, [FEW] and their count."""
    order = tl.cumsum(reaches.to(tl.int32), axis=0)
    first = tl.atomic_add(count_ptr, tl.max(order, axis=0).to(tl.int64), sem="relaxed")
    place = first + order - 1
    tl.store(few_ptr + place, _few_key(rank, index, UNUSED_BITS, ID_BITS), mask=reaches & (place < FEW))


@triton.jit
def are_enough(count, top_k, FEW: tl.constexpr):
    """Whether a row's first `top_k` ids are among the `count` that it gathered; not if it gathered none."""
    return (count > 0) & (count >= top_k) & (count <= FEW)


@triton.jit
def kept_of_few(
    few_ptr, count, peak, law, UNUSED_BITS: tl.constexpr, ID_BITS: tl.constexpr, FEW: tl.constexpr
):
    """Which of the gathered ids are kept, the ids and their logits and masses, all [FEW].

    With them where the row's kept ids end, for what was not gathered here: a search key, and the last id that has it.
    """
    temperature, top_k, top_p, min_p = law
    KEY_BITS: tl.constexpr = 32 - UNUSED_BITS + ID_BITS
    order = tl.arange(0, FEW)
    keys = tl.load(few_ptr + order, mask=order < count, other=-1)
    # No two keys are equal, so no more than top_k reach the last one.
    last = _last_needed(keys, tl.full([FEW], 1, tl.int64), top_k.to(tl.int64), KEY_BITS)
    keys = tl.where(keys >= last, keys, -1)
    value = tl.where(
        keys >= 0, value_of_key(_search_key(keys, UNUSED_BITS, ID_BITS), UNUSED_BITS), float("-inf")
    )
    mass = tl.where(keys >= 0, mass_of(value, peak, temperature), 0)
    if top_p < 1.0:
        last = _last_needed(keys, mass, mass_needed(top_p, tl.sum(mass, axis=0)), KEY_BITS)
    kept = (keys >= last) & (value >= cut_of(peak, temperature, min_p))
    edge = _search_key(last, UNUSED_BITS, ID_BITS), _id(last, ID_BITS)
    return kept, _id(keys, ID_BITS), value, mass, edge


def launch_likely_ranks(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    ranks: torch.Tensor,
    gathered: torch.Tensor,
) -> None:
    """Fill `ranks` int32 [M] for logits [M, V]; rows without a place in `gathered` gather nothing."""
    num_rows, vocab_size = logits.shape
    likely_rank_kernel[(num_rows,)](
        logits,
        temperatures,
        top_ks,
        ranks,
        logits.stride(0),
        vocab_size,
        gathered.shape[0],
        FEW=gathered.shape[1],
        num_warps=_NUM_WARPS,
    )


def likely_rank_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test of each op."""
    specs = []
    for logits, size in (("*bf16:16", "i32:16"), ("*fp32", "i32")):
        signature = {"logits_ptr": logits, "temperatures_ptr": "*fp32:16", "top_ks_ptr": "*i32:16"}
        signature |= {"ranks_ptr": "*i32:16", "row_stride": size, "vocab_size": size, "num_gathering": "i32"}
        specs.append(
            (likely_rank_kernel, signature, {"FEW": gathered_shape(1)[1]}, {"num_warps": _NUM_WARPS})
        )
    return specs
