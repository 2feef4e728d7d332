"""greedy_tokens: a Python loop, the torch reference and the Triton kernel agree."""

from __future__ import annotations

import math

import pytest
import torch

from trtllm_tree.kernels.greedy_tokens import greedy_tokens, workspace_shape
from trtllm_tree.kernels.greedy_tokens.reference import reference
from trtllm_tree.kernels.greedy_tokens.triton import launch


def _loop(row: list[float]) -> int:
    if any(math.isnan(value) for value in row):
        return -1
    best = 0
    for index, value in enumerate(row):
        if value > row[best]:
            best = index
    return best


def _hostile_logits(vocab: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows with many ties, strided so that most of them are not aligned."""
    logits = torch.randn(11, vocab + 3).mul(4).round().to(dtype)[:, :vocab]
    logits[1] = -torch.inf
    logits[2, vocab // 2] = torch.inf
    logits[3, vocab - 1] = torch.nan
    logits[4, 0] = torch.nan
    logits[5] = -0.0
    logits[5, vocab // 3 :] = 0.0
    # A single finite value behind -inf; the largest in the first and in the last tile; both NaN and +inf.
    logits[6] = -torch.inf
    logits[6, vocab - 1] = torch.finfo(dtype).min
    logits[7, [0, vocab - 1]] = 100.0
    logits[8, vocab - 1] = 100.0
    logits[9, 0], logits[9, vocab - 1] = torch.inf, -torch.nan
    return logits.to(device)


@pytest.mark.parametrize("vocab", [1, 5, 300, 8192, 8193, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_three_derivations_agree_on_ties_infinities_and_nan(
    vocab: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(vocab)
    logits = _hostile_logits(vocab, dtype, device)
    want = [_loop(row) for row in logits.float().tolist()]
    assert greedy_tokens(logits).tolist() == want
    workspace = torch.zeros(workspace_shape(13), dtype=torch.int64, device=device)
    for run in (reference, lambda *tensors: launch(*tensors, workspace)):
        out = torch.full((11,), 12345, dtype=torch.int32, device=device)
        run(logits, out)
        assert out.tolist() == want


def test_a_workspace_serves_call_after_call_and_is_left_zero(device: str, monkeypatch) -> None:
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    workspace = torch.zeros(workspace_shape(8), dtype=torch.int64, device=device)
    tokens = torch.full((8,), 12345, dtype=torch.int32, device=device)
    # Each call's logits are lower than those before it: a maximum left behind would win.
    for rows, vocab, peak in ((8, 17000, 50.0), (3, 9000, -1.0), (8, 8192, -70.0)):
        logits = torch.full((rows, vocab), -90.0, device=device)
        places = [(7 * row + vocab // 2) % vocab for row in range(rows)]
        logits[range(rows), places] = peak
        returned = greedy_tokens(logits, tokens=tokens[:rows], workspace=workspace)
        assert returned.data_ptr() == tokens.data_ptr()
        assert tokens[:rows].tolist() == places
        assert not workspace.any()


def test_rows_may_outnumber_neither_output_nor_workspace(device: str, monkeypatch) -> None:
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    logits = torch.zeros(4, 10, device=device)
    with pytest.raises(AssertionError, match="workspace"):
        greedy_tokens(logits, workspace=torch.zeros(3, 2, dtype=torch.int64, device=device))
    with pytest.raises(AssertionError, match="tokens"):
        greedy_tokens(logits, tokens=torch.zeros(3, dtype=torch.int32, device=device))
