"""`window_slots` against a loop over positions, as torch reference and as Triton kernel."""

from __future__ import annotations

import pytest
import torch

from trtllm_tree.kernels.window_slots import window_slots
from trtllm_tree.kernels.window_slots.reference import reference
from trtllm_tree.kernels.window_slots.triton import launch


def slot_of(position: int, table: list[int], page_size: int) -> int:
    index = position // page_size
    page = table[index] if index < len(table) and table[index] > 0 else 0
    return page * page_size + position % page_size


@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
@pytest.mark.parametrize("num_rows", [1, 12, 64, 65])
def test_slots_follow_the_page_table_and_end_in_the_dummy_page(device, num_rows, page_size):
    torch.manual_seed(num_rows + page_size)
    max_pages = 5
    # The last request starts beyond its table; entries -1 and 0 are not allocated; the rows are a slice.
    first = [0, page_size - 1, 2 * page_size + 3, max_pages * page_size - 2, max_pages * page_size + 7]
    wide = torch.randint(1, 1000, (len(first), max_pages + 2), dtype=torch.int32)
    wide[1, 3], wide[2, 4] = -1, 0
    page_table = wide.to(device)[:, :max_pages]
    first_positions = torch.tensor(first, dtype=torch.int32, device=device)
    tables = page_table.tolist()
    expected = [[slot_of(p + i, tables[b], page_size) for i in range(num_rows)] for b, p in enumerate(first)]

    for run in (reference, launch):
        storage = torch.full((len(first), num_rows + 4), -77, dtype=torch.int32, device=device)
        run(first_positions, page_table, page_size=page_size, slots=storage[:, :num_rows])
        assert storage[:, :num_rows].tolist() == expected, f"{run.__module__}"
        assert (storage[:, num_rows:] == -77).all()
    assert (
        window_slots(first_positions, page_table, num_rows=num_rows, page_size=page_size).tolist() == expected
    )
