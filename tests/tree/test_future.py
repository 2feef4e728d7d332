"""Invariant I13: the next round's tree rides with the next round's tokens, by pool slot."""

from __future__ import annotations

import torch

from tests.oracles import trees
from tests.oracles.draft_tree import DraftTreeOracle
from trtllm_tree.tree.draft_tree import DraftTree
from trtllm_tree.tree.future import FutureParentMap, FutureWindows
from trtllm_tree.tree.lanes import TreeDraftInputs

NUM_SLOTS, NUM_NODES = 6, 9
TOPK, NUM_STEPS = 3, 2


def test_every_slot_starts_as_the_chain(device):
    future = FutureParentMap(NUM_SLOTS, NUM_NODES, device)
    assert future.parents.dtype == torch.int32
    assert future.parents.tolist() == [trees.chain(NUM_NODES)] * NUM_SLOTS


def test_a_reset_slot_is_the_chain_and_no_other_slot_changes(device):
    future = FutureParentMap(NUM_SLOTS, NUM_NODES, device)
    address = future.parents.data_ptr()
    future.parents.fill_(5)
    future.reset(2)
    expected = [[5] * NUM_NODES for _ in range(NUM_SLOTS)]
    expected[2] = trees.chain(NUM_NODES)
    assert future.parents.tolist() == expected
    future.parents[4].fill_(7)
    future.reset(4)
    expected[4] = trees.chain(NUM_NODES)
    assert future.parents.tolist() == expected
    assert future.parents.data_ptr() == address


class Drafts:
    """A `DraftTree` over random scores, with oracles that grew the same trees."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.tree = DraftTree(
            4,
            topk=TOPK,
            num_steps=NUM_STEPS,
            num_nodes=NUM_NODES,
            hidden_size=1,
            dtype=torch.float32,
            device=device,
        )
        self.lanes = TreeDraftInputs(4, TOPK, NUM_STEPS, device)

    def round(self, slots: list[int], future: FutureWindows) -> list[tuple[list[int], list[int]]]:
        """Draft for pool slots; returns the windows (tokens, parents) that the oracles expect."""
        oracles = [DraftTreeOracle(TOPK, NUM_STEPS) for _ in slots]
        for step in range(NUM_STEPS):
            shape = (len(slots), 1 if step == 0 else TOPK, TOPK)
            scores, tokens = -3.0 * torch.rand(shape), torch.randint(0, 99, shape, dtype=torch.int32)
            hidden = torch.zeros(*shape[:2], 1)
            inputs = (tensor.to(self.device) for tensor in (scores, tokens, hidden))
            self.tree.expand(step, *inputs, self.lanes)
            for oracle, row, ids in zip(oracles, scores.tolist(), tokens.tolist(), strict=True):
                oracle.grow(row, ids)
        roots = torch.randint(0, 99, (len(slots),), dtype=torch.int32)
        self.tree.select(roots.to(self.device), slots=torch.tensor(slots, device=self.device), future=future)
        windows = []
        for oracle, root in zip(oracles, roots.tolist(), strict=True):
            nodes = oracle.select(NUM_NODES, root)
            windows.append(([node.token for node in nodes], [node.parent for node in nodes]))
        return windows


def test_a_selected_tree_is_left_by_slot_until_the_slot_is_written_again(device):
    torch.manual_seed(0)
    parents = FutureParentMap(NUM_SLOTS, NUM_NODES, device)
    future = FutureWindows(torch.zeros_like(parents.parents), parents.parents)
    drafts = Drafts(device)
    expected = [([0] * NUM_NODES, trees.chain(NUM_NODES)) for _ in range(NUM_SLOTS)]
    # The drafter's buffers hold other requests each round: the maps must not be views of them.
    for slots in ([4, 0, 2, 5], [1], [0, 3], [2, 4, 1]):
        for slot, window in zip(slots, drafts.round(slots, future), strict=True):
            expected[slot] = window
        assert future.tokens.tolist() == [tokens for tokens, _ in expected]
        assert future.parents.tolist() == [parents for _, parents in expected]


def test_pad_rows_that_share_a_slot_leave_a_tree_there(device):
    torch.manual_seed(1)
    parents = FutureParentMap(NUM_SLOTS, NUM_NODES, device)
    future = FutureWindows(torch.full_like(parents.parents, -7), parents.parents)
    window, *_ = Drafts(device).round([3, 5, 5, 5], future)
    assert (future.tokens[3].tolist(), future.parents[3].tolist()) == window
    assert min(future.tokens[5].tolist()) >= 0
    assert all(parent < node for node, parent in enumerate(future.parents[5].tolist()))
    assert (future.tokens[[0, 1, 2, 4]] == -7).all()
