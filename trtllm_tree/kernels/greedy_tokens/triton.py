"""greedy_tokens in Triton: one program a row, one pass over its logits."""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton

_BLOCK = 8192


@triton.jit
def greedy_tokens_kernel(logits_ptr, tokens_ptr, vocab_size, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    # Per column of the block, the best value so far and where it was first seen.
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32) + column
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        index = start + column
        value = tl.load(
            logits_ptr + row * row_stride + index, mask=index < vocab_size, other=float("-inf")
        ).to(tl.float32)
        bad |= (value != value).to(tl.int32)
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, index, where)
    peak = tl.max(best, axis=0)
    # A column that never saw more than -inf still points at its own first index, so ties resolve by id.
    token = tl.min(tl.where(best == peak, where, 2147483647), axis=0)
    token = tl.where(tl.max(bad, axis=0) > 0, -1, token)
    tl.store(tokens_ptr + row, token)


def launch(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Fill `tokens` int32 [M]."""
    rows, vocab_size = logits.shape
    if rows:
        greedy_tokens_kernel[(rows,)](
            logits, tokens, vocab_size, logits.stride(0), BLOCK=_block(vocab_size), num_warps=8
        )


def _block(vocab_size: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(vocab_size))


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Kernels and typical sizes for ahead-of-time compilation."""
    return [
        (
            greedy_tokens_kernel,
            {
                "logits_ptr": f"*{dtype}",
                "tokens_ptr": "*i32",
                "vocab_size": "i32",
                "row_stride": "i32",
                "BLOCK": "constexpr",
            },
            {"BLOCK": _BLOCK},
            {"num_warps": 8},
        )
        for dtype in ("bf16", "fp32")
    ]
