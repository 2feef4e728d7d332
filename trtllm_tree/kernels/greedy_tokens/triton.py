"""greedy_tokens in Triton: a row is cut into tiles, one program each; a row's last program to finish names the token.

A program reduces its tile to one number that orders by logit and then by lower id, so that tiles meet in a maximum,
in any order. A single program a row would be too few programs to keep a GPU's memory busy: a verify window has few
rows, and they are long.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton

_TILE = 8192
_NUM_WARPS = 8


@triton.jit
def greedy_tokens_kernel(
    logits_ptr, workspace_ptr, tokens_ptr, row_stride, vocab_size, num_tiles, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    best_ptr = workspace_ptr + 2 * row
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    # Padding has the highest ids of its row, so that it loses even among nothing but -inf.
    logits_ptr += row * row_stride
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)

    # As integers, negative floats order backwards: flip all but their sign. -0.0 equals 0.0, and NaN beats all.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    rank = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    peak = tl.max(rank, axis=0)
    token = tl.min(tl.where(rank == peak, index, 0x7FFFFFFF), axis=0)
    # Above 0, which is what an unused workspace holds.
    key = ((peak.to(tl.int64) + 0x80000000) << 31) | (0x7FFFFFFF - token).to(tl.int64)

    # One thread does all three, so the count publishes the maximum, and whoever counts last sees all of them.
    tl.atomic_max(best_ptr, key, sem="relaxed")
    if tl.atomic_add(best_ptr + 1, 1, sem="acq_rel", scope="gpu") == num_tiles - 1:
        best = tl.atomic_xchg(best_ptr, tl.zeros([], tl.int64), sem="relaxed")
        tl.store(best_ptr + 1, 0)
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        tl.store(tokens_ptr + row, tl.where((best >> 31) == 0xFFFFFFFF, -1, token))


def launch(logits: torch.Tensor, tokens: torch.Tensor, workspace: torch.Tensor) -> None:
    """Fill `tokens` int32 [M]; `workspace` as in the op."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    tile = _tile(vocab_size)
    num_tiles = triton.cdiv(vocab_size, tile)
    greedy_tokens_kernel[(num_rows, num_tiles)](
        logits,
        workspace,
        tokens,
        logits.stride(0),
        vocab_size,
        num_tiles,
        TILE=tile,
        num_warps=_NUM_WARPS,
    )


def _tile(vocab_size: int) -> int:
    return min(_TILE, triton.next_power_of_2(vocab_size))


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test: V = 128256 aligned, and a strided odd one."""
    specs = []
    for dtype, aligned in (("bf16", ":16"), ("fp32", ":16"), ("fp32", "")):
        signature = {"logits_ptr": f"*{dtype}{aligned}", "workspace_ptr": "*i64:16", "tokens_ptr": "*i32:16"}
        signature |= {"row_stride": f"i32{aligned}", "vocab_size": f"i32{aligned}", "num_tiles": "i32"}
        specs.append((greedy_tokens_kernel, signature, {"TILE": _TILE}, {"num_warps": _NUM_WARPS}))
    return specs
