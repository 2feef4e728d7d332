"""rejection_tokens in Triton: one program a row, which streams its row as often as its law needs.

Unrestricted that is twice: for the peak, and for the sum of what is kept together with the draw from what the children
leave. That draw needs no children tried: it counts only where all of them are rejected. Children that were drawn and
not chosen take one more pass for each that is rejected.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._row_law import (
    UNUSED_LOGIT_BITS,
    best_key,
    kept_range,
    load_block,
    mass_of,
    noise,
    rank_of,
    uniform,
    value_of,
)
from trtllm_tree.kernels._triton import tl, triton

_BLOCK = 2048
_NUM_WARPS = 16


@triton.jit
def _kept_draw(
    logits_ptr,
    vocab_size,
    peak,
    seed,
    position,
    temperature,
    threshold,
    num_ties,
    cut,
    children,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass of what is kept, the last kept id at the threshold, and a draw from what is kept and no child.

    `children` int32 holds the children's tokens, and the largest int32 elsewhere.
    """
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
    token = 0x7FFFFFFF - (tl.max(best, axis=0) & 0x7FFFFFFF).to(tl.int32)
    return tl.sum(total, axis=0), last_tie, token


@triton.jit
def _first_chosen(valid, candidates, mass, number, total, token, BLOCK_NODES: tl.constexpr):
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
def _offered(draft_ptr, index, draft_vocab_size):
    """Masses int64 of the draft at some ids."""
    in_draft = (index >= 0) & (index < draft_vocab_size)
    return (tl.load(draft_ptr + index, mask=in_draft, other=0.0) * 1099511627776.0).to(tl.int64)


@triton.jit
def _take(left, offered, scale):
    """What a rejection leaves of the target's masses."""
    return tl.maximum(left - (scale * offered.to(tl.float64)).to(tl.int64), 0)


@triton.jit
def _left(
    logits_ptr,
    draft_ptr,
    vocab_size,
    draft_vocab_size,
    peak,
    seed,
    position,
    temperature,
    threshold,
    last_tie,
    cut,
    missed,
    scales,
    DRAWS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """What the children that `missed` leave of the target, each at its `scales`: its mass, or a draw from it."""
    node = tl.arange(0, BLOCK_NODES)
    result = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        index, value, key = load_block(logits_ptr, start, vocab_size, UNUSED_BITS, BLOCK)
        kept = (key > threshold) | ((key == threshold) & (index <= last_tie))
        kept = kept & (value >= cut) & (index < vocab_size)
        left = tl.where(kept, mass_of(value, peak, temperature), 0)
        offered = _offered(draft_ptr, index, draft_vocab_size)
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
def _first_drawn(
    logits_ptr,
    draft_ptr,
    vocab_size,
    draft_vocab_size,
    peak,
    seed,
    position,
    temperature,
    threshold,
    last_tie,
    cut,
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
    offered = tl.where(valid, _offered(draft_ptr, candidates, draft_vocab_size), 0)
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
                logits_ptr,
                draft_ptr,
                vocab_size,
                draft_vocab_size,
                peak,
                seed,
                position,
                temperature,
                threshold,
                last_tie,
                cut,
                missed,
                scales,
                False,
                UNUSED_BITS,
                BLOCK,
                BLOCK_NODES,
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
            logits_ptr,
            draft_ptr,
            vocab_size,
            draft_vocab_size,
            peak,
            seed,
            position,
            temperature,
            threshold,
            last_tie,
            cut,
            missed,
            scales,
            True,
            UNUSED_BITS,
            BLOCK,
            BLOCK_NODES,
        )
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    return token


@triton.jit
def rejection_tokens_kernel(
    logits_ptr,
    candidates_ptr,
    parents_ptr,
    draft_probs_ptr,
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    tokens_ptr,
    row_stride,
    candidates_stride_b,
    parents_stride_b,
    vocab_size,
    draft_vocab_size,
    num_nodes,
    HAS_DRAFT: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request, parent = row // num_nodes, (row % num_nodes).to(tl.int32)
    logits_ptr += row * row_stride
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        index, value, _key = load_block(logits_ptr, start, vocab_size, UNUSED_BITS, BLOCK)
        best = tl.maximum(best, tl.where(index < vocab_size, best_key(rank_of(value), index), 0))
    top = tl.max(best, axis=0)
    token = 0x7FFFFFFF - (top & 0x7FFFFFFF).to(tl.int32)
    rank = ((top >> 31) - 0x80000000).to(tl.int32)
    temperature = tl.load(temperatures_ptr + row)
    if rank == 0x7FFFFFFF:
        token = -1
    elif temperature > 0.0:
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        peak = value_of(rank)
        threshold, num_ties, cut = kept_range(
            logits_ptr,
            vocab_size,
            peak,
            temperature,
            tl.load(top_ks_ptr + row),
            tl.load(top_ps_ptr + row),
            tl.load(min_ps_ptr + row),
            UNUSED_BITS,
            BLOCK,
        )
        node = tl.arange(0, BLOCK_NODES)
        exists = node < num_nodes
        # -2 is nobody's child.
        parents = tl.load(parents_ptr + request * parents_stride_b + node, mask=exists, other=-2)
        candidates = tl.load(candidates_ptr + request * candidates_stride_b + node, mask=exists, other=-1)
        is_child = (parents == parent) & (node > parent)
        number = uniform(seed, position, tl.cumsum(is_child.to(tl.int32), axis=0) - 1)
        valid = is_child & (candidates >= 0) & (candidates < vocab_size)
        children = tl.where(valid, candidates, 0x7FFFFFFF)
        total, last_tie, token = _kept_draw(
            logits_ptr,
            vocab_size,
            peak,
            seed,
            position,
            temperature,
            threshold,
            num_ties,
            cut,
            children,
            UNUSED_BITS,
            BLOCK,
        )
        value = tl.load(logits_ptr + candidates, mask=valid, other=float("-inf")).to(tl.float32)
        key = rank_of(value) >> UNUSED_BITS
        kept = valid & (value >= cut) & ((key > threshold) | ((key == threshold) & (candidates <= last_tie)))
        mass = tl.where(kept, mass_of(value, peak, temperature), 0)
        draft_total = tl.zeros([], tl.int64)
        if HAS_DRAFT:
            draft_probs_ptr += row * draft_vocab_size
            # Nothing was drawn where there is no child.
            if tl.max((is_child & (candidates >= 0)).to(tl.int32), axis=0) > 0:
                sums = tl.zeros([BLOCK], tl.int64)
                for start in range(0, draft_vocab_size, BLOCK):
                    sums += _offered(draft_probs_ptr, start + tl.arange(0, BLOCK), draft_vocab_size)
                draft_total = tl.sum(sums, axis=0)
        if draft_total == 0:
            token = _first_chosen(valid, candidates, mass, number, total, token, BLOCK_NODES)
        elif HAS_DRAFT:
            token = _first_drawn(
                logits_ptr,
                draft_probs_ptr,
                vocab_size,
                draft_vocab_size,
                peak,
                seed,
                position,
                temperature,
                threshold,
                last_tie,
                cut,
                valid,
                candidates,
                mass,
                number,
                total,
                draft_total,
                UNUSED_BITS,
                BLOCK,
                BLOCK_NODES,
            )
    tl.store(tokens_ptr + row, token)


def launch(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    parents: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    draft_probs: torch.Tensor | None,
    tokens: torch.Tensor,
) -> None:
    """Fill `tokens` int32 [M]; arguments as in the op."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    num_nodes = candidates.shape[1]
    rejection_tokens_kernel[(num_rows,)](
        logits,
        candidates,
        parents,
        # Never read without.
        logits if draft_probs is None else draft_probs,
        seeds,
        positions,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        tokens,
        logits.stride(0),
        candidates.stride(0),
        parents.stride(0),
        vocab_size,
        0 if draft_probs is None else draft_probs.shape[2],
        num_nodes,
        HAS_DRAFT=draft_probs is not None,
        UNUSED_BITS=UNUSED_LOGIT_BITS[logits.dtype],
        BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(vocab_size))),
        BLOCK_NODES=max(2, triton.next_power_of_2(num_nodes)),
        num_warps=_NUM_WARPS,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test: 64 and 256 nodes, children chosen and drawn."""
    types = dict.fromkeys(("seeds", "positions"), "*i64") | dict.fromkeys(
        ("candidates", "parents", "top_ks", "tokens"), "*i32"
    )
    specs = []
    for dtype, name, aligned, has_draft, nodes in (
        (torch.bfloat16, "bf16", ":16", False, 64),
        (torch.float16, "fp16", ":16", True, 64),
        (torch.float32, "fp32", ":16", False, 256),
        (torch.float32, "fp32", "", True, 64),
    ):
        names = [
            arg.removesuffix("_ptr") for arg in rejection_tokens_kernel.arg_names if arg.endswith("_ptr")
        ]
        signature = {f"{arg}_ptr": f"{types.get(arg, '*fp32')}:16" for arg in names}
        signature["logits_ptr"] = f"*{name}{aligned}"
        signature |= {"row_stride": f"i32{aligned}", "vocab_size": f"i32{aligned}"}
        signature |= dict.fromkeys(
            ("candidates_stride_b", "parents_stride_b", "draft_vocab_size", "num_nodes"), "i32"
        )
        constexprs = {"HAS_DRAFT": has_draft, "UNUSED_BITS": UNUSED_LOGIT_BITS[dtype], "BLOCK": _BLOCK}
        constexprs["BLOCK_NODES"] = nodes
        specs.append((rejection_tokens_kernel, signature, constexprs, {"num_warps": _NUM_WARPS}))
    return specs
