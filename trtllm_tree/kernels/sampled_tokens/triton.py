"""sampled_tokens in Triton: one pass of tiles, as many programs a row; a filtered row's last one then goes on.

A plain row's draw is a maximum, so its tiles meet in one number in any order, as an argmax does. So does the best
score of a row with top-p or min-p, which is its draw more often than not, and the peak of a row with top-k. What the
last program to finish does with them is in `filtered`.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._row_law import UNUSED_LOGIT_BITS, best_key, noise, rank_of, value_of
from trtllm_tree.kernels._triton import tl, triton
from trtllm_tree.kernels.sampled_tokens import gathered_shape
from trtllm_tree.kernels.sampled_tokens.filtered import nucleus_draw, top_k_draw

_TILE = 4096
_BLOCK = 2048
_NUM_WARPS = 8


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
    gathered_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    num_gathering,
    UNUSED_BITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best_ptr = workspace_ptr + 3 * row
    logits_ptr += row * row_stride
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    temperature = tl.load(temperatures_ptr + row)
    top_k, top_p, min_p = tl.load(top_ks_ptr + row), tl.load(top_ps_ptr + row), tl.load(min_ps_ptr + row)
    draws = temperature > 0.0
    has_top_k = draws & (top_k > 0) & (top_k < vocab_size)
    is_nucleus = draws & (has_top_k == 0) & ((top_p < 1.0) | (min_p > 0.0))

    start = tl.program_id(1) * TILE
    index = start + tl.arange(0, TILE)
    # Padding has the highest ids of its row, so that it loses even among nothing but -inf.
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    if is_nucleus:
        tl.atomic_max(best_ptr + 2, tl.max(rank_of(value), axis=0).to(tl.int64) + 0x80000000, sem="relaxed")
    if draws & (has_top_k == 0):
        value += temperature * noise(seed, position, start, TILE)
    rank = rank_of(value)
    highest = tl.max(rank, axis=0)
    token = tl.min(tl.where(rank == highest, index, 0x7FFFFFFF), axis=0)

    # One thread does all of these, so the count publishes the maxima, and whoever counts last sees all of them.
    tl.atomic_max(best_ptr, best_key(highest, token), sem="relaxed")
    if tl.atomic_add(best_ptr + 1, 1, sem="acq_rel", scope="gpu") == num_tiles - 1:
        best = tl.atomic_xchg(best_ptr, tl.zeros([], tl.int64), sem="relaxed")
        raw = tl.atomic_xchg(best_ptr + 2, tl.zeros([], tl.int64), sem="relaxed")
        tl.atomic_xchg(best_ptr + 1, tl.zeros([], tl.int64), sem="relaxed")
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        highest = ((best >> 31) - 0x80000000).to(tl.int32)
        if highest == 0x7FFFFFFF:
            token = -1
        elif is_nucleus:
            peak = value_of((raw - 0x80000000).to(tl.int32))
            token = nucleus_draw(
                logits_ptr, vocab_size, peak, token, seed, position, temperature, top_p, min_p, BLOCK
            )
        elif has_top_k:
            token = top_k_draw(
                logits_ptr,
                vocab_size,
                value_of(highest),
                seed,
                position,
                temperature,
                top_k,
                top_p,
                min_p,
                row < num_gathering,
                best_ptr + 1,
                gathered_ptr + row * FEW,
                UNUSED_BITS,
                BLOCK,
                FEW,
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
    gathered: torch.Tensor,
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
        gathered,
        logits.stride(0),
        vocab_size,
        num_tiles,
        gathered.shape[0],
        UNUSED_BITS=UNUSED_LOGIT_BITS[logits.dtype],
        TILE=tile,
        BLOCK=min(_BLOCK, padded),
        FEW=gathered.shape[1],
        num_warps=_NUM_WARPS,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test: V = 128256 aligned, and a strided odd one."""
    types = {"seeds": "*i64", "positions": "*i64", "top_ks": "*i32", "tokens": "*i32"}
    types |= {"workspace": "*i64", "gathered": "*i64"}
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
        signature |= {"row_stride": f"i32{aligned}", "vocab_size": f"i32{aligned}"}
        signature |= {"num_tiles": "i32", "num_gathering": "i32"}
        constexprs = {
            "UNUSED_BITS": UNUSED_LOGIT_BITS[dtype],
            "TILE": _TILE,
            "BLOCK": _BLOCK,
            "FEW": gathered_shape(1)[1],
        }
        # Two of a row's parameters, which wait for its end, beside keys of full width.
        options = {"num_warps": _NUM_WARPS, "spill_bytes": 8 if dtype == torch.float32 else 0}
        specs.append((sampled_tokens_kernel, signature, constexprs, options))
    return specs
