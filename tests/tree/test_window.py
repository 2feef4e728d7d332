"""Invariant I3: position follows depth, slot follows node index, from a window's opening to its close."""

from __future__ import annotations

import random

import pytest
import torch

from tests.oracles import trees
from tests.toy import MAX_BATCH, PAD_SLOT
from tests.toy_host import ToyHost
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Candidates

NUM_NODES = 9


class NoDrafter:
    """Drafts chains of zeros and leaves nothing; these tests plant their own trees."""

    def draft(self, batch, predict, accept_len, features, positions, *, future) -> Candidates:
        self.positions, self.features = positions.clone(), features.clone()
        size = predict.shape[0]
        parents = torch.tensor([trees.chain(NUM_NODES)] * size, dtype=torch.int32, device=predict.device)
        return Candidates(torch.zeros_like(parents), parents, torch.zeros(size, NUM_NODES))


def planted_host(device: str, planted: dict[int, tuple[list[int], list[int]]]) -> ToyHost:
    """A host whose pool slots hold the given (parents, tokens) for their next window."""
    config = SpeculativeConfig(tree_topk=2, num_steps=4, num_nodes=NUM_NODES, speculative_model="head")
    host = ToyHost(config, device)
    host.round.drafter = NoDrafter()
    ints = {"dtype": torch.int32, "device": device}
    for slot, (parents, tokens) in planted.items():
        host.round.future_input_map[slot] = torch.tensor(tokens, **ints)
        host.round.tree.parents.parents[slot] = torch.tensor(parents, **ints)
    return host


def random_plants(seed: int) -> dict[int, tuple[list[int], list[int]]]:
    rng = random.Random(seed)
    return {
        slot: (trees.random_tree(rng, NUM_NODES), [rng.randrange(17) for _ in range(NUM_NODES)])
        for slot in range(PAD_SLOT)
    }


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1], [2]])
def test_rows_get_the_position_of_their_depth_and_the_slot_of_their_index(device, order):
    planted = random_plants(0)
    host = planted_host(device, planted)
    host.committed |= {0: 7, 1: 0, 2: 15, 3: 16}
    batch = host.batch(order)
    given = batch.write_slots.clone()
    window = host.round.open_window(batch)
    assert window.tokens.tolist() == [planted[slot][1] for slot in order]
    assert window.positions.tolist() == [
        [host.committed[slot] + depth for depth in trees.depths(planted[slot][0])] for slot in order
    ]
    for group, before, after in zip(host.groups, given, batch.write_slots, strict=True):
        assert torch.equal(before, after), "a tree moves no slot"
        assert after.tolist() == [
            [group.slot(slot, host.committed[slot] + node) for node in range(NUM_NODES)] for slot in order
        ]


@pytest.mark.parametrize("node", range(NUM_NODES))
def test_behind_the_round_each_kept_row_stands_at_the_slot_of_its_own_position(device, node):
    # The target's choice is dictated by logits, so that exactly the path to `node` is accepted.
    planted = random_plants(node)
    parents, tokens = planted[1]
    path = trees.path_to(parents, node)[:5]
    tokens[:] = range(NUM_NODES)
    host = planted_host(device, planted)
    host.committed[1] = 6
    for position in range(6):
        for group in host.groups:
            group.write(group.slot(1, position), (position + 100, position))
    batch = host.batch([1, PAD_SLOT])
    window = host.round.open_window(batch)
    logits = torch.zeros_like(host.forward(batch, window))
    states = [host.groups[0].read(1, 6 + row)[0] for row in range(NUM_NODES)]
    for row, following in zip(path, [*path[1:], None], strict=True):
        logits[row, 16 if following is None else tokens[following]] = 1.0
    accepted = host.round.close_window(batch, window, logits)
    assert accepted.path[0].tolist() == path + [-1] * (NUM_NODES - len(path))
    for group in host.groups:
        for depth, row in enumerate(path):
            # A row carries the state and the position that it was computed with.
            assert group.read(1, 6 + depth) == (states[row], 6 + depth)
        assert [group.read(1, position) for position in range(6)] == [(p + 100, p) for p in range(6)]
    drafter = host.round.drafter
    assert drafter.positions[0].tolist() == [6 + i for i in range(NUM_NODES)]
    assert drafter.features[0, : len(path), 0].tolist() == [states[row] for row in path]
    assert window.positions[0].tolist() == [6 + i for i in range(NUM_NODES)]


def test_a_chain_has_the_positions_of_its_indices_and_no_tree(device):
    config = SpeculativeConfig(tree_topk=1, num_steps=3, speculative_model="head")
    host = ToyHost(config, device)
    host.committed |= {slot: 3 * slot for slot in range(PAD_SLOT)}
    window = host.round.open_window(host.batch(range(MAX_BATCH)))
    assert window.tree is None
    assert window.positions.tolist() == [
        [host.committed[slot] + i for i in range(4)] for slot in range(MAX_BATCH)
    ]
