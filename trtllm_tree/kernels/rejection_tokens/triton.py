"""rejection_tokens in Triton: a pass of tiles over all rows, and then one program a row.

The tiles find each row's largest logit, and gather what may be among the first ids of a row with a small top-k; such a
row is not read again. Any other is streamed once more, for the sum of what is kept together with the draw from what the
children leave, and before that as often as its last kept logit takes to find. That draw needs no children tried: it
counts only where all of them are rejected. Children that were drawn and not chosen take one more pass for each that is
rejected.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._few import append, launch_likely_ranks, likely_rank_specs
from trtllm_tree.kernels._row_buffers import gathered_shape
from trtllm_tree.kernels._row_law import (
    UNUSED_LOGIT_BITS,
    best_key,
    id_of_best,
    mass_of,
    rank_of,
    rank_of_best,
    uniform,
    value_of,
)
from trtllm_tree.kernels._triton import tl, triton
from trtllm_tree.kernels.rejection_tokens.filtered import is_kept, kept_draw
from trtllm_tree.kernels.rejection_tokens.siblings import first_chosen, first_drawn, offered_masses

_TILE = 2048
_TILE_WARPS = 4
_BLOCK = 2048
# Warps of a row's program, and where the rows are too few to fill a GPU or eight warps' registers to hold a block.
_NUM_WARPS, _MORE_WARPS = 8, 16
_FEW_ROWS = 256


@triton.jit
def rejection_tokens_kernel_tiles(
    logits_ptr,
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
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = index < vocab_size
    value = tl.load(logits_ptr + row * row_stride + index, mask=mask, other=float("-inf")).to(tl.float32)
    rank = rank_of(value)
    # Padding has the highest ids of its row, so that it loses even among nothing but -inf.
    highest = tl.max(rank, axis=0)
    token = tl.min(tl.where(rank == highest, index, 0x7FFFFFFF), axis=0)
    tl.atomic_max(workspace_ptr, best_key(highest, token), sem="relaxed")
    likely_rank = tl.load(likely_ranks_ptr + row)
    if likely_rank < 0x7FFFFFFF:
        reaches = mask & (rank >= likely_rank)
        append(gathered_ptr + row * FEW, workspace_ptr + 1, rank, index, reaches, UNUSED_BITS, ID_BITS, FEW)


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
    workspace_ptr,
    gathered_ptr,
    row_stride,
    candidates_stride_b,
    parents_stride_b,
    vocab_size,
    draft_vocab_size,
    num_nodes,
    HAS_DRAFT: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    FEW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request, parent = row // num_nodes, (row % num_nodes).to(tl.int32)
    logits_ptr += row * row_stride
    # One thread reads and clears, so that none reads what is already cleared.
    best = tl.atomic_xchg(workspace_ptr + 2 * row, tl.zeros([], tl.int64), sem="relaxed")
    count = tl.atomic_xchg(workspace_ptr + 2 * row + 1, tl.zeros([], tl.int64), sem="relaxed")
    token = id_of_best(best)
    temperature = tl.load(temperatures_ptr + row)
    if rank_of_best(best) == 0x7FFFFFFF:
        token = -1
    elif temperature > 0.0:
        peak = value_of(rank_of_best(best))
        whole_row = (logits_ptr, vocab_size, peak)
        draw = (tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        law = (
            temperature,
            tl.load(top_ks_ptr + row),
            tl.load(top_ps_ptr + row),
            tl.load(min_ps_ptr + row),
        )
        node = tl.arange(0, BLOCK_NODES)
        exists = node < num_nodes
        # -2 is nobody's child.
        parents = tl.load(parents_ptr + request * parents_stride_b + node, mask=exists, other=-2)
        candidates = tl.load(candidates_ptr + request * candidates_stride_b + node, mask=exists, other=-1)
        is_child = (parents == parent) & (node > parent)
        number = uniform(draw[0], draw[1], tl.cumsum(is_child.to(tl.int32), axis=0) - 1)
        valid = is_child & (candidates >= 0) & (candidates < vocab_size)
        children = tl.where(valid, candidates, 0x7FFFFFFF)
        few_ptr = gathered_ptr + row * FEW
        total, kept, token = kept_draw(
            whole_row, law, draw, children, few_ptr, count, UNUSED_BITS, ID_BITS, BLOCK, FEW
        )
        value = tl.load(logits_ptr + candidates, mask=valid, other=float("-inf")).to(tl.float32)
        in_law = valid & is_kept(rank_of(value) >> UNUSED_BITS, value, candidates, kept)
        mass = tl.where(in_law, mass_of(value, peak, temperature), 0)
        draft = (draft_probs_ptr + row * draft_vocab_size, draft_vocab_size)
        draft_total = tl.zeros([], tl.int64)
        # Nothing was drawn where there is no child.
        has_children = tl.max((is_child & (candidates >= 0)).to(tl.int32), axis=0) > 0
        if HAS_DRAFT and has_children:
            sums = tl.zeros([BLOCK], tl.int64)
            for start in range(0, draft_vocab_size, BLOCK):
                sums += offered_masses(draft, start + tl.arange(0, BLOCK))
            draft_total = tl.sum(sums, axis=0)
        if draft_total == 0:
            token = first_chosen(valid, candidates, mass, number, total, token, BLOCK_NODES)
        elif HAS_DRAFT:
            token = first_drawn(
                whole_row,
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
    workspace: torch.Tensor,
    gathered: torch.Tensor,
) -> None:
    """Fill `tokens` int32 [M]; arguments as in the op."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    num_nodes = candidates.shape[1]
    padded = max(16, triton.next_power_of_2(vocab_size))
    tile = min(_TILE, padded)
    sizes = {
        "UNUSED_BITS": UNUSED_LOGIT_BITS[logits.dtype],
        "ID_BITS": vocab_size.bit_length(),
        "FEW": gathered.shape[1],
    }
    needs_more = num_rows <= _FEW_ROWS or logits.dtype == torch.float32
    # The tokens' places hold the likely ranks until the last of the three writes them.
    launch_likely_ranks(logits, temperatures, top_ks, tokens, gathered)
    rejection_tokens_kernel_tiles[(num_rows, triton.cdiv(vocab_size, tile))](
        logits,
        tokens,
        workspace,
        gathered,
        logits.stride(0),
        vocab_size,
        TILE=tile,
        num_warps=_TILE_WARPS,
        **sizes,
    )
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
        workspace,
        gathered,
        logits.stride(0),
        candidates.stride(0),
        parents.stride(0),
        vocab_size,
        0 if draft_probs is None else draft_probs.shape[2],
        num_nodes,
        HAS_DRAFT=draft_probs is not None,
        BLOCK=min(_BLOCK, padded),
        BLOCK_NODES=max(2, triton.next_power_of_2(num_nodes)),
        num_warps=_MORE_WARPS if needs_more else _NUM_WARPS,
        **sizes,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test: 64 and 256 nodes, children chosen and drawn."""
    types = dict.fromkeys(("seeds", "positions", "workspace", "gathered"), "*i64") | dict.fromkeys(
        ("candidates", "parents", "top_ks", "tokens", "likely_ranks"), "*i32"
    )
    specs = likely_rank_specs()
    for dtype, name, aligned, has_draft, nodes, num_warps in (
        (torch.bfloat16, "bf16", ":16", False, 64, _NUM_WARPS),
        (torch.bfloat16, "bf16", ":16", True, 64, _MORE_WARPS),
        (torch.float16, "fp16", ":16", True, 64, _NUM_WARPS),
        (torch.float32, "fp32", ":16", False, 256, _MORE_WARPS),
        (torch.float32, "fp32", "", True, 64, _MORE_WARPS),
    ):
        sizes = {"UNUSED_BITS": UNUSED_LOGIT_BITS[dtype], "ID_BITS": 17, "FEW": gathered_shape(1)[1]}
        tail = {"HAS_DRAFT": has_draft, "BLOCK": _BLOCK, "BLOCK_NODES": nodes}
        for kernel, constexprs, warps in (
            (rejection_tokens_kernel_tiles, {"TILE": _TILE}, _TILE_WARPS),
            (rejection_tokens_kernel, tail, num_warps),
        ):
            signature = {}
            for arg in kernel.arg_names:
                stem = arg.removesuffix("_ptr")
                signature[arg] = f"{types.get(stem, '*fp32')}:16" if arg != stem else "i32"
            signature["logits_ptr"] = f"*{name}{aligned}"
            signature |= {"row_stride": f"i32{aligned}", "vocab_size": f"i32{aligned}"}
            # Eight warps with many rows are faster, by a seventh on an H200, although some of it spills.
            spill_bytes = 40 if warps == _NUM_WARPS else 0
            options = {"num_warps": warps, "spill_bytes": spill_bytes}
            specs.append((kernel, signature, sizes | constexprs, options))
    return specs
