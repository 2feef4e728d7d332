"""sampled_tokens in Triton: one pass of tiles, as many programs a row; a filtered row's last one then searches.

A plain row's draw is a maximum, so its tiles meet in one number in any order, as an argmax does. A row with top-k,
top-p or min-p meets in its peak instead, and the last program to finish goes on alone: it finds the last kept
logit two bits a pass, by the count or the mass of the ids above, and draws among the kept.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._row_law import (
    UNUSED_LOGIT_BITS,
    best_key,
    kept_range,
    load_block,
    noise,
    rank_of,
    value_of,
)
from trtllm_tree.kernels._triton import tl, triton

_TILE = 4096
_BLOCK = 2048
_NUM_WARPS = 8


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
    """The token of one row whose largest logit is `peak`."""
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
        value += temperature * noise(seed, position, start, TILE)
    rank = rank_of(value)
    peak = tl.max(rank, axis=0)
    token = tl.min(tl.where(rank == peak, index, 0x7FFFFFFF), axis=0)

    # One thread does all three, so the count publishes the maximum, and whoever counts last sees all of them.
    tl.atomic_max(best_ptr, best_key(peak, token), sem="relaxed")
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
                value_of(peak),
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
        UNUSED_BITS=UNUSED_LOGIT_BITS[logits.dtype],
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
        constexprs = {"UNUSED_BITS": UNUSED_LOGIT_BITS[dtype], "TILE": _TILE, "BLOCK": _BLOCK}
        specs.append((sampled_tokens_kernel, signature, constexprs, {"num_warps": _NUM_WARPS}))
    return specs
