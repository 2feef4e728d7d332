"""Invariant I13: the next round's tree rides with the next round's tokens, by pool slot."""

from __future__ import annotations

import random

import torch

from tests.oracles import trees
from trtllm_tree.tree.future import FutureParentMap

NUM_SLOTS, NUM_NODES = 6, 9


def tensor(rows: list[list[int]], device: str) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


def test_every_slot_starts_as_the_chain(device):
    future = FutureParentMap(NUM_SLOTS, NUM_NODES, device)
    assert future.parents.dtype == torch.int32
    assert future.parents.tolist() == [trees.chain(NUM_NODES)] * NUM_SLOTS


def test_parents_are_published_by_slot_and_reset_to_the_chain(device):
    rng = random.Random(0)
    future = FutureParentMap(NUM_SLOTS, NUM_NODES, device)
    address = future.parents.data_ptr()
    expected = [trees.chain(NUM_NODES) for _ in range(NUM_SLOTS)]
    for _ in range(20):
        slots = rng.sample(range(NUM_SLOTS), rng.randrange(1, NUM_SLOTS + 1))
        published = [trees.random_tree(rng, NUM_NODES) for _ in slots]
        future.publish(torch.tensor(slots, device=device), tensor(published, device))
        for slot, parents in zip(slots, published, strict=True):
            expected[slot] = parents
        gone = rng.randrange(NUM_SLOTS)
        future.reset(gone)
        expected[gone] = trees.chain(NUM_NODES)
        assert future.parents.tolist() == expected
    assert future.parents.data_ptr() == address


def test_what_is_published_is_a_copy(device):
    # The drafter's buffers are overwritten by the next round, of other requests perhaps.
    future = FutureParentMap(NUM_SLOTS, NUM_NODES, device)
    drafted = tensor([trees.star(NUM_NODES)], device)
    future.publish(torch.tensor([4], device=device), drafted)
    drafted.fill_(7)
    assert future.parents[4].tolist() == trees.star(NUM_NODES)
    future.reset(4)
    future.parents[2].fill_(5)
    future.reset(2)
    assert future.parents.tolist() == [trees.chain(NUM_NODES)] * NUM_SLOTS
