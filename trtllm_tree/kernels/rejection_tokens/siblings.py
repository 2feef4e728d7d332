"""Which of a node's children is the first to be accepted: those that were chosen, and those that were drawn.

Chosen ones need their own masses only. Drawn ones change the law of the whole row with each rejection, which takes one
pass over the row each, and one more for the draw from what they leave. It must not know how a row's law came about.

`row`, `draw` and `kept` are as in `filtered`.
"""

from __future__ import annotations

from trtllm_tree.kernels._row_law import best_key, id_of_best, load_block, mass_of, noise, rank_of
from trtllm_tree.kernels._triton import tl, triton
from trtllm_tree.kernels.rejection_tokens.filtered import is_kept


@triton.jit
def first_chosen(valid, candidates, mass, number, total, token, BLOCK_NODES: tl.constexpr):
    """The token of the first accepted child of those that were chosen; `token` if there is none."""
    node = tl.arange(0, BLOCK_NODES)
    child = tl.min(tl.where(valid, node, BLOCK_NODES), axis=0)
    while child < BLOCK_NODES:
        here = node == child
        wanted = tl.sum(tl.where(here, mass, 0), axis=0)
        its_token = tl.sum(tl.where(here, candidates, 0), axis=0)
        accepted = tl.sum(tl.where(here, number, 0.0), axis=0) * total.to(tl.float64) < wanted.to(tl.float64)
        token = tl.where(accepted, its_token, token)
        total -= wanted
        mass = tl.where(candidates == its_token, 0, mass)
        following = tl.min(tl.where(valid & (node > child), node, BLOCK_NODES), axis=0)
        child = tl.where(accepted, BLOCK_NODES, following)
    return token


@triton.jit
def offered_masses(draft, index):
    """Masses int64 of the draft at some ids; `draft` is (address, vocabulary size)."""
    draft_ptr, draft_vocab_size = draft
    in_draft = (index >= 0) & (index < draft_vocab_size)
    return (tl.load(draft_ptr + index, mask=in_draft, other=0.0) * 1099511627776.0).to(tl.int64)


@triton.jit
def _take(left, offered, scale):
    """What a rejection leaves of the target's masses."""
    return tl.maximum(left - (scale * offered.to(tl.float64)).to(tl.int64), 0)


@triton.jit
def _left(
    row,
    temperature,
    draw,
    draft,
    kept,
    missed,
    scales,
    DRAWS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """What the children that `missed` leave of the target, each at its `scales`: its mass, or a draw from it."""
    logits_ptr, vocab_size, peak = row
    seed, position = draw
    node = tl.arange(0, BLOCK_NODES)
    result = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        index, value, key = load_block(logits_ptr, start, vocab_size, UNUSED_BITS, BLOCK)
        is_in = is_kept(key, value, index, kept) & (index < vocab_size)
        left = tl.where(is_in, mass_of(value, peak, temperature), 0)
        offered = offered_masses(draft, index)
        child = tl.min(tl.where(missed, node, BLOCK_NODES), axis=0)
        while child < BLOCK_NODES:
            # A child's own mass is gone with its rejection, so its later offers need not be taken out.
            left = _take(left, offered, tl.sum(tl.where(node == child, scales, 0.0), axis=0))
            child = tl.min(tl.where(missed & (node > child), node, BLOCK_NODES), axis=0)
        if DRAWS:
            score = tl.log(tl.maximum(left, 1).to(tl.float32)) + noise(seed, position, start, BLOCK)
            result = tl.maximum(result, tl.where(left > 0, best_key(rank_of(score), index), 0))
        else:
            result += left
    return tl.max(result, axis=0) if DRAWS else tl.sum(result, axis=0)


@triton.jit
def first_drawn(
    row,
    temperature,
    draw,
    draft,
    kept,
    valid,
    candidates,
    mass,
    number,
    total,
    draft_total,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """The token of the first accepted child of those that were drawn, or a draw from what they leave."""
    node = tl.arange(0, BLOCK_NODES)
    token = tl.full([], -1, tl.int32)
    missed = node < 0
    scales = tl.zeros([BLOCK_NODES], tl.float64)
    offered = tl.where(valid, offered_masses(draft, candidates), 0)
    child = tl.min(tl.where(offered > 0, node, BLOCK_NODES), axis=0)
    while child < BLOCK_NODES:
        here = node == child
        scale = total.to(tl.float64) / draft_total.to(tl.float64)
        its_offer = tl.sum(tl.where(here, offered, 0), axis=0)
        its_token = tl.sum(tl.where(here, candidates, 0), axis=0)
        bound = tl.sum(tl.where(here, number, 0.0), axis=0) * (scale * its_offer.to(tl.float64))
        accepted = bound < tl.sum(tl.where(here, mass, 0), axis=0).to(tl.float64)
        if accepted == 0:
            missed = missed | here
            scales = tl.where(here, scale, scales)
            total = _left(
                row, temperature, draw, draft, kept, missed, scales, False, UNUSED_BITS, BLOCK, BLOCK_NODES
            )
            mass = _take(mass, offered, scale)
            draft_total -= its_offer
            offered = tl.where(candidates == its_token, 0, offered)
        # Laws that are one but for rounding leave nothing.
        accepted = accepted | (total == 0)
        token = tl.where(accepted, its_token, token)
        child = tl.min(tl.where((offered > 0) & (node > child), node, BLOCK_NODES), axis=0)
        child = tl.where(accepted, BLOCK_NODES, child)
    if token < 0:
        best = _left(
            row, temperature, draw, draft, kept, missed, scales, True, UNUSED_BITS, BLOCK, BLOCK_NODES
        )
        token = id_of_best(best)
    return token
