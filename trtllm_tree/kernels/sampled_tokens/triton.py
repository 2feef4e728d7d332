"""sampled_tokens in Triton: a pass of tiles over all rows, and for rows that filter one program a row behind it.

A plain row's draw is a maximum, so its tiles meet in one number in any order, as an argmax does, and the last of them
writes the token: one kernel. The best score of a row with top-p or min-p is a maximum too, and its draw more often than
not; so is the peak of a row with top-k, whose tiles also gather what may be among its first ids. What else a filtered
row takes is in `filtered`, and a kernel of its own, since a tile needs few registers and there are many of them.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._few import append, launch_likely_ranks, likely_rank_specs
from trtllm_tree.kernels._row_buffers import gathered_shape
from trtllm_tree.kernels._row_law import (
    UNUSED_LOGIT_BITS,
    best_key,
    id_of_best,
    noise,
    rank_of,
    rank_of_best,
    value_of,
)
from trtllm_tree.kernels._triton import tl, triton
from trtllm_tree.kernels.sampled_tokens.filtered import nucleus_draw, top_k_draw

_TILE = 2048
_TILE_WARPS = 4
_NUM_WARPS = 8
# A row is streamed by blocks: of float32, as long as registers hold all its keys.
_BLOCK = {torch.bfloat16: 2048, torch.float16: 2048, torch.float32: 1024}


@triton.jit
def _parameters(temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr, row, vocab_size):
    """A row's law, and by which kind it draws: as an argmax, from what top-p and min-p keep, from what top-k keeps."""
    law = (
        tl.load(temperatures_ptr + row),
        tl.load(top_ks_ptr + row),
        tl.load(top_ps_ptr + row),
        tl.load(min_ps_ptr + row),
    )
    draws = law[0] > 0.0
    has_top_k = draws & (law[1] > 0) & (law[1] < vocab_size)
    is_nucleus = draws & (has_top_k == 0) & ((law[2] < 1.0) | (law[3] > 0.0))
    return law, has_top_k, is_nucleus


@triton.jit
def _best_of_tile(value, index, start, temperature, seed, position, TILE: tl.constexpr):
    """The best score of a tile and its id as one number; at temperature 0 of the logits themselves."""
    rank = rank_of(value)
    if temperature > 0.0:
        rank = rank_of(value + temperature * noise(seed, position, start, TILE))
    highest = tl.max(rank, axis=0)
    token = tl.min(tl.where(rank == highest, index, 0x7FFFFFFF), axis=0)
    return best_key(highest, token)


@triton.jit
def _token_of(best):
    """The id in the best number of a row; -1 where the best is a NaN."""
    return tl.where(rank_of_best(best) == 0x7FFFFFFF, -1, id_of_best(best))


@triton.jit
def sampled_tokens_kernel_plain(
    logits_ptr,
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    tokens_ptr,
    workspace_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    workspace_ptr += 2 * row
    start = tl.program_id(1) * TILE
    index = start + tl.arange(0, TILE)
    # Padding has the highest ids of its row, so that it loses even among nothing but -inf.
    value = tl.load(logits_ptr + row * row_stride + index, mask=index < vocab_size, other=float("-inf"))
    temperature = tl.load(temperatures_ptr + row)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    best = _best_of_tile(value.to(tl.float32), index, start, temperature, seed, position, TILE)
    # One thread does all of these, so the count publishes the maxima, and whoever counts last sees all of them.
    tl.atomic_max(workspace_ptr, best, sem="relaxed")
    if tl.atomic_add(workspace_ptr + 1, 1, sem="acq_rel", scope="gpu") == num_tiles - 1:
        best = tl.atomic_xchg(workspace_ptr, tl.zeros([], tl.int64), sem="relaxed")
        tl.atomic_xchg(workspace_ptr + 1, tl.zeros([], tl.int64), sem="relaxed")
        tl.store(tokens_ptr + row, _token_of(best))


@triton.jit
def sampled_tokens_kernel_tiles(
    logits_ptr,
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    likely_ranks_ptr,
    workspace_ptr,
    gathered_ptr,
    row_stride,
    vocab_size,
    UNUSED_BITS: tl.constexpr,
    ID_BITS: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    workspace_ptr += 2 * row
    law, has_top_k, is_nucleus = _parameters(
        temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr, row, vocab_size
    )
    start = tl.program_id(1) * TILE
    index = start + tl.arange(0, TILE)
    mask = index < vocab_size
    # Padding has the highest ids of its row, so that it loses even among nothing but -inf.
    value = tl.load(logits_ptr + row * row_stride + index, mask=mask, other=float("-inf")).to(tl.float32)
    rank = rank_of(value)
    if is_nucleus:
        tl.atomic_max(workspace_ptr + 1, tl.max(rank, axis=0).to(tl.int64) + 0x80000000, sem="relaxed")
    likely_rank = tl.load(likely_ranks_ptr + row)
    if likely_rank < 0x7FFFFFFF:
        reaches = mask & (rank >= likely_rank)
        append(gathered_ptr + row * FEW, workspace_ptr + 1, rank, index, reaches, UNUSED_BITS, ID_BITS, FEW)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    temperature = tl.where(has_top_k, 0.0, law[0])
    tl.atomic_max(
        workspace_ptr, _best_of_tile(value, index, start, temperature, seed, position, TILE), sem="relaxed"
    )


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
    UNUSED_BITS: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    # One thread reads and clears, so that none reads what is already cleared.
    best = tl.atomic_xchg(workspace_ptr + 2 * row, tl.zeros([], tl.int64), sem="relaxed")
    other = tl.atomic_xchg(workspace_ptr + 2 * row + 1, tl.zeros([], tl.int64), sem="relaxed")
    law, has_top_k, is_nucleus = _parameters(
        temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr, row, vocab_size
    )
    draw = (tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    token = _token_of(best)
    if (token >= 0) & is_nucleus:
        whole_row = (logits_ptr, vocab_size, value_of((other - 0x80000000).to(tl.int32)))
        token = nucleus_draw(whole_row, law, draw, token, BLOCK)
    elif (token >= 0) & has_top_k:
        whole_row = (logits_ptr, vocab_size, value_of(rank_of_best(best)))
        few_ptr = gathered_ptr + row * FEW
        token = top_k_draw(whole_row, law, draw, few_ptr, other, UNUSED_BITS, ID_BITS, BLOCK, FEW)
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
    *,
    filters: bool = True,
) -> None:
    """Fill `tokens` int32 [M]; arguments as in the op."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    padded = max(16, triton.next_power_of_2(vocab_size))
    tile = min(_TILE, padded)
    tiles = (num_rows, triton.cdiv(vocab_size, tile))
    if not filters:
        drawn = (seeds, positions, temperatures, tokens, workspace)
        sampled_tokens_kernel_plain[tiles](
            logits, *drawn, logits.stride(0), vocab_size, tiles[1], TILE=tile, num_warps=_TILE_WARPS
        )
        return
    arguments = (
        logits,
        seeds,
        positions,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        # The tokens' places hold the likely ranks until the last of the three kernels writes them.
        tokens,
        workspace,
        gathered,
        logits.stride(0),
        vocab_size,
    )
    sizes = {
        "UNUSED_BITS": UNUSED_LOGIT_BITS[logits.dtype],
        "ID_BITS": vocab_size.bit_length(),
        "FEW": gathered.shape[1],
    }
    launch_likely_ranks(logits, temperatures, top_ks, tokens, gathered)
    sampled_tokens_kernel_tiles[tiles](*arguments, TILE=tile, num_warps=_TILE_WARPS, **sizes)
    sampled_tokens_kernel[(num_rows,)](
        *arguments, BLOCK=min(_BLOCK[logits.dtype], padded), num_warps=_NUM_WARPS, **sizes
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test: V = 128256 aligned, and a strided odd one."""
    types = dict.fromkeys(("seeds", "positions", "workspace", "gathered"), "*i64") | dict.fromkeys(
        ("top_ks", "tokens", "likely_ranks"), "*i32"
    )
    specs = likely_rank_specs()
    for dtype, name, aligned in (
        (torch.bfloat16, "bf16", ":16"),
        (torch.float16, "fp16", ":16"),
        (torch.float32, "fp32", ":16"),
        (torch.float32, "fp32", ""),
    ):
        sizes = {"UNUSED_BITS": UNUSED_LOGIT_BITS[dtype], "ID_BITS": 17, "FEW": gathered_shape(1)[1]}
        for kernel, constexprs, num_warps in (
            (sampled_tokens_kernel_plain, {"TILE": _TILE}, _TILE_WARPS),
            (sampled_tokens_kernel_tiles, sizes | {"TILE": _TILE}, _TILE_WARPS),
            (sampled_tokens_kernel, sizes | {"BLOCK": _BLOCK[dtype]}, _NUM_WARPS),
        ):
            stems = [arg.removesuffix("_ptr") for arg in kernel.arg_names if arg.endswith("_ptr")]
            signature = {f"{stem}_ptr": f"{types.get(stem, '*fp32')}:16" for stem in stems}
            signature["logits_ptr"] = f"*{name}{aligned}"
            signature |= {"row_stride": f"i32{aligned}", "vocab_size": f"i32{aligned}"}
            if "num_tiles" in kernel.arg_names:
                signature["num_tiles"] = "i32"
            specs.append((kernel, signature, constexprs, {"num_warps": num_warps}))
    return specs
