"""greedy_tokens: a Python loop, the torch reference and the Triton kernel agree."""

from __future__ import annotations

import math

import pytest
import torch

from trtllm_tree.kernels.greedy_tokens import greedy_tokens
from trtllm_tree.kernels.greedy_tokens.triton import launch


def _loop(row: list[float]) -> int:
    if any(math.isnan(value) for value in row):
        return -1
    best = 0
    for index, value in enumerate(row):
        if value > row[best]:
            best = index
    return best


@pytest.mark.parametrize("vocab", [1, 5, 300, 8192, 8193, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_three_derivations_agree_on_ties_infinities_and_nan(
    vocab: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(vocab)
    logits = (
        torch.randn(7, vocab + 3).mul(4).round().to(dtype)[:, :vocab].to(device)
    )  # many ties, strided rows
    logits[1] = -torch.inf
    logits[2, vocab // 2] = torch.inf
    logits[3, vocab - 1] = torch.nan
    logits[4, 0] = torch.nan
    want = [_loop(row) for row in logits.float().tolist()]
    assert greedy_tokens(logits).tolist() == want
    out = torch.full((7,), 12345, dtype=torch.int32, device=device)
    launch(logits, out)
    assert out.tolist() == want
