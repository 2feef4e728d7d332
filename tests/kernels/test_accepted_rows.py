"""accepted_rows: a Python loop, the torch reference and the Triton kernel agree on every element."""

from __future__ import annotations

import random

import pytest
import torch

from trtllm_tree.kernels.accepted_rows import accepted_rows
from trtllm_tree.kernels.accepted_rows.triton import launch


@pytest.mark.parametrize(
    ("batch", "rows", "width"), [(1, 1, 1), (3, 32, 6), (5, 4, 4), (2, 65, 11), (4, 2, 2)]
)
def test_three_derivations_agree(batch: int, rows: int, width: int, device: str) -> None:
    rng = random.Random(rows)
    accept = [rng.randint(1, rows) for _ in range(batch)]
    accept[0] = rows  # a dummy window kept whole, beyond any drafted path
    table = [[rng.randrange(9) if i < n else -1 for i in range(rows)] for n in accept]
    table[-1][accept[-1] - 1] = -1  # a row of NaN
    committed = [rng.randrange(1000) for _ in range(batch)]
    want = (
        [[max(token, 0) for token in row[:width]] for row in table],
        [b * width + min(n, width) - 1 for b, n in enumerate(accept)],
        [max(row[n - 1], 0) for row, n in zip(table, accept, strict=True)],
        [a + n for a, n in zip(committed, accept, strict=True)],
    )
    wide = torch.full((batch, rows + 3), 77, dtype=torch.int32, device=device)
    wide[:, :rows] = torch.tensor(table, dtype=torch.int32)
    inputs = [
        wide[:, :rows],
        *(torch.tensor(values, dtype=torch.int32, device=device) for values in (accept, committed)),
    ]
    for run in (accepted_rows, launch):
        ints = [torch.full((batch,), 12345, dtype=torch.int32, device=device) for _ in range(2)]
        outputs = {
            "tokens": torch.full((batch, width + 2), 12345, dtype=torch.int32, device=device)[:, :width],
            "last_rows": torch.full((batch,), 12345, dtype=torch.int64, device=device),
            "roots": ints[0],
            "frontier": ints[1],
        }
        run(*inputs, **outputs)
        assert tuple(output.tolist() for output in outputs.values()) == want
