"""accepted_rows: a Python loop, the torch reference and the Triton kernel agree on every element."""

from __future__ import annotations

import random

import pytest
import torch

from trtllm_tree.kernels.accepted_rows import LaneRows, accepted_rows
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


def slot_of(position: int, table: list[int], page_size: int) -> int:
    """The cache slot of a position; what has no page lies in the dummy page."""
    index = position // page_size
    page = max(table[index], 0) if index < len(table) else 0
    return page * page_size + position % page_size


@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
@pytest.mark.parametrize(("num_steps", "num_rows"), [(2, 1), (3, 6), (5, 16), (9, 64), (10, 72), (6, 80)])
def test_lanes_stand_behind_the_accepted_rows(
    num_steps: int, num_rows: int, page_size: int, device: str
) -> None:
    rng = random.Random(num_rows + page_size)
    max_pages = 5
    # From a page's start, over a page edge, past the end of the table, and beyond it; two inert pad rows.
    frontier = [page_size, 2 * page_size + 3, max_pages * page_size - 1, max_pages * page_size + 7, 1, 1]
    accept = [min(rng.randint(1, 4), first) for first in frontier]
    pages = [[rng.randint(1, 99) for _ in range(max_pages)] for _ in frontier]
    pages[1][2], pages[2][-1], pages[4:] = -1, 0, [[0] * max_pages] * 2
    batch, ints = len(frontier), {"dtype": torch.int32, "device": device}
    page_table = torch.full((batch, max_pages + 2), 77, **ints)
    page_table[:, :max_pages] = torch.tensor(pages)
    predict = torch.full((batch, 4), 3, **ints)
    committed = [first - n for first, n in zip(frontier, accept, strict=True)]
    inputs = [predict, *(torch.tensor(values, **ints) for values in (accept, committed))]
    for run in (accepted_rows, launch):
        positions = torch.full((batch, num_steps + 1), 12345, dtype=torch.int64, device=device)
        slots = torch.full((batch, num_rows + 2), 12345, **ints)
        outputs = {name: torch.full((batch,), 12345, **ints) for name in ("roots", "frontier")}
        outputs["last_rows"] = torch.full((batch,), 12345, dtype=torch.int64, device=device)
        outputs["tokens"] = torch.full((batch, 4), 12345, **ints)
        rows = LaneRows(
            positions[:, : num_steps - 1], slots[:, :num_rows], page_table[:, :max_pages], page_size
        )
        run(*inputs, **outputs, lanes=rows)
        assert outputs["frontier"].tolist() == frontier
        assert positions.tolist() == [
            [first + step for step in range(num_steps - 1)] + [12345] * 2 for first in frontier
        ]
        assert slots.tolist() == [
            [slot_of(first + row, table, page_size) for row in range(num_rows)] + [12345] * 2
            for first, table in zip(frontier, pages, strict=True)
        ]
