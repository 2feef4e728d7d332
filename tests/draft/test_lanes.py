"""Invariant I9: draft lanes write the draft cache like any draft step, and see exactly their ancestors."""

from __future__ import annotations

import random

import pytest
import torch

from tests.oracles.draft_tree import DraftTreeOracle
from trtllm_tree.kernels.accepted_rows import accepted_rows
from trtllm_tree.tree.draft_tree import DraftTree
from trtllm_tree.tree.lanes import TreeDraftInputs

MAX_BATCH = 4


def slot_of(position: int, table: list[int], page_size: int) -> int:
    """The cache slot of a position; what has no page lies in the dummy page."""
    index = position // page_size
    page = table[index] if index < len(table) else 0
    return max(page, 0) * page_size + position % page_size


def begin(
    lanes: TreeDraftInputs, frontier: list[int], table: torch.Tensor, page_size: int, *, in_round: bool
) -> None:
    """Place the lanes as a decode round does, or as behind a prefill."""
    first = torch.tensor(frontier, dtype=torch.int32, device=table.device)
    if not in_round:
        lanes.begin(first, table, page_size)
        return
    one, batch = torch.ones_like(first), len(frontier)
    accepted_rows(
        one.unsqueeze(1),
        one,
        first - 1,
        tokens=torch.empty_like(one).unsqueeze(1),
        last_rows=one.long(),
        roots=torch.empty_like(one),
        frontier=lanes.frontier[:batch],
        lanes=lanes.rows(batch, table, page_size),
    )


@pytest.mark.parametrize("in_round", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize(("topk", "num_steps"), [(2, 2), (4, 4), (8, 9)])
def test_lane_slots_follow_the_page_table_and_end_in_the_dummy_page(
    device, topk, num_steps, page_size, in_round
):
    torch.manual_seed(page_size)
    lanes = TreeDraftInputs(MAX_BATCH, topk, num_steps, device)
    pages = 6
    table = torch.randperm(50)[: 3 * pages].view(3, pages).int() + 1
    table[1, -1] = 0
    # From a page's start, over a page edge, and past the end of the table.
    frontier = [0, page_size * (pages - 1) - 1, page_size * pages - 1]
    addresses, written = set(), [set() for _ in frontier]
    for step in range(1, num_steps):
        begin(lanes, frontier, table.to(device), page_size, in_round=in_round)
        slots = lanes.slots(step, len(frontier))
        addresses.add(slots.data_ptr() - slots.storage_offset() * slots.element_size())
        positions = [[first + (step - 1) * topk + lane for lane in range(topk)] for first in frontier]
        rows = zip(positions, table.tolist(), strict=True)
        assert slots.tolist() == [[slot_of(p, pages_of, page_size) for p in row] for row, pages_of in rows]
        for request, row in enumerate(positions):
            written[request] |= set(row)
    # No slot is written twice in a round, and together they are (S - 1) * K behind the frontier (bug B7).
    for request, first in enumerate(frontier):
        assert written[request] == set(range(first, first + (num_steps - 1) * topk))
    assert lanes.window == (num_steps - 1) * topk
    assert len(addresses) == 1


@pytest.mark.parametrize("in_round", [False, True])
def test_all_lanes_of_a_step_have_one_position(device, in_round):
    # Judged in bug B9: every lane of a step has the same depth, so no position is gathered through parents.
    lanes = TreeDraftInputs(MAX_BATCH, 3, 5, device)
    table = torch.zeros(4, 1, dtype=torch.int32, device=device)
    begin(lanes, [9, 0, 100, 7], table, 16, in_round=in_round)
    begin(lanes, [40, 1], table[:2], 16, in_round=in_round)
    for step in range(1, 5):
        positions = lanes.positions(step, 2)
        assert positions.dtype == torch.int64
        assert positions.tolist() == [[first + step - 1] * 3 for first in (40, 1)]
    assert lanes.frontier.tolist() == [40, 1, 100, 7]


class Growth:
    """A `DraftTree` growing over given scores, with the lanes under test."""

    def __init__(self, device: str, topk: int, num_steps: int) -> None:
        self.device, self.topk, self.num_steps = device, topk, num_steps
        self.lanes = TreeDraftInputs(MAX_BATCH, topk, num_steps, device)
        self.tree = DraftTree(
            MAX_BATCH,
            topk=topk,
            num_steps=num_steps,
            num_nodes=topk + 1,
            hidden_size=1,
            dtype=torch.float32,
            device=device,
        )

    def expand(self, step: int, scores: list[list[list[float]]]) -> None:
        tensor = torch.tensor(scores, device=self.device)
        hidden = torch.zeros(*tensor.shape[:2], 1, device=self.device)
        self.tree.expand(step, tensor, torch.zeros_like(tensor, dtype=torch.int32), hidden, self.lanes)

    def seen_slots(self, batch: int) -> list[list[set[int]]]:
        """Per request and lane, the window columns whose bit is set."""
        return [
            [
                {64 * w + bit for w, word in enumerate(words) for bit in range(64) if word >> bit & 1}
                for words in request
            ]
            for request in self.lanes.lane_mask[:batch].tolist()
        ]


def test_both_survivors_of_one_parent_see_that_parents_slot(device):
    # Bug A3: after re-ranking, a lane kept attending to the lane above its own row, not to its real parent.
    growth = Growth(device, 2, 4)
    growth.expand(0, [[[-0.1, -0.2]], [[-0.1, -0.2]]])
    # Step 1's lanes 0 and 1 hold slots 0 and 1 and see nothing else yet.
    assert growth.seen_slots(2) == [[{0}, {1}]] * 2
    # Request 0: both children of lane 1 survive. Request 1: one child each, but in reversed order.
    growth.expand(1, [[[-9.0, -9.0], [-0.1, -0.2]], [[-0.5, -9.0], [-0.1, -9.0]]])
    assert growth.seen_slots(2) == [[{1, 2}, {1, 3}], [{1, 2}, {0, 3}]]
    growth.expand(2, [[[-9.0, -9.0], [-0.1, -0.2]], [[-0.1, -9.0], [-9.0, -0.1]]])
    assert growth.seen_slots(2) == [[{1, 3, 4}, {1, 3, 5}], [{1, 2, 4}, {0, 3, 5}]]


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (2, 6), (4, 4), (8, 10), (16, 5)])
def test_each_lane_sees_its_ancestors_slots_and_its_own(device, topk, num_steps):
    rng = random.Random(topk)
    growth = Growth(device, topk, num_steps)
    # Two rounds on the same buffers, the second with fewer requests.
    for batch in (MAX_BATCH, 2):
        oracles = [DraftTreeOracle(topk, num_steps) for _ in range(batch)]
        for step in range(num_steps):
            rows = 1 if step == 0 else topk
            scores = [[[-3.0 * rng.random() for _ in range(topk)] for _ in range(rows)] for _ in range(batch)]
            growth.expand(step, scores)
            for oracle, given in zip(oracles, scores, strict=True):
                exact = torch.tensor(given).tolist()
                oracle.grow(exact, [[0] * topk for _ in given])
            if step == num_steps - 1:
                continue
            masks = [oracle.lane_masks() for oracle in oracles]
            seen = [
                [{bit for bit in range(mask.bit_length()) if mask >> bit & 1} for mask in row]
                for row in masks
            ]
            assert growth.seen_slots(batch) == seen
            # One slot a step, the last one its own.
            for request in seen:
                for lane, slots in enumerate(request):
                    assert sorted(slot // topk for slot in slots) == list(range(step + 1))
                    assert max(slots) == step * topk + lane


def test_a_single_step_has_no_lane_window(device):
    lanes = TreeDraftInputs(MAX_BATCH, 4, 1, device)
    assert lanes.window == 0
    assert lanes.rows(2, torch.zeros(2, 1, dtype=torch.int32, device=device), 16) is None
    assert lanes.lane_mask.shape == (MAX_BATCH, 4, 1) and not lanes.lane_mask.any()
