"""Invariant I1: the tree is a parameter of the chain path; a chain-shaped tree verifies like the chain."""

from __future__ import annotations

import random

import pytest
import torch

from tests.oracles import trees
from tests.oracles.verify_walk import walk
from trtllm_tree.kernels.tree_ancestors import tree_ancestors
from trtllm_tree.sampling.base import Accepted
from trtllm_tree.sampling.greedy import GreedySampler
from trtllm_tree.tree.verify_batch import TreeVerifyBatch

MAX_BATCH, VOCAB = 5, 5
DTYPES = [torch.float32, torch.bfloat16]


def make_tree(parents: list[list[int]], device: str) -> TreeVerifyBatch:
    tensor = torch.tensor(parents, dtype=torch.int32, device=device)
    depths, mask = tree_ancestors(tensor)
    return TreeVerifyBatch(parents=tensor, depths=depths, ancestor_mask=mask)


def make_sampler(num_nodes: int, device: str, *, tree: bool = True) -> GreedySampler:
    return GreedySampler(MAX_BATCH, num_nodes, device=device, tree=tree)


def python_argmax(row: list[float]) -> int:
    """The first of the largest, -1 with a NaN among them."""
    if any(value != value for value in row):
        return -1
    return max(range(len(row)), key=lambda i: (row[i], -i))


def lucky_tokens(rng: random.Random, parents: list[list[int]], logits: torch.Tensor) -> list[list[int]]:
    """Tokens that mostly are the target's choice behind their parent, so that paths get long."""
    rows = logits.view(len(parents), len(parents[0]), -1).tolist()
    tokens = []
    for request, tree in enumerate(parents):
        wanted = [python_argmax(rows[request][parent]) for parent in tree]
        tokens.append([t if t >= 0 and rng.random() < 0.8 else rng.randrange(VOCAB) for t in wanted])
    return tokens


def random_logits(rows: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Coarse values, so that many rows have several largest ones; some are -inf; a few rows hold a NaN."""
    logits = torch.randint(0, 3, (rows, VOCAB)).float()
    logits[torch.rand(rows, VOCAB) < 0.15] = -torch.inf
    poisoned = (torch.rand(rows) < 0.05).nonzero().squeeze(1)
    logits[poisoned, torch.randint(0, VOCAB, poisoned.shape)] = torch.nan
    return logits.to(device=device, dtype=dtype)


def as_lists(accepted: Accepted) -> tuple[list, list, list]:
    assert accepted.path is not None
    return accepted.path.tolist(), accepted.accept_len.tolist(), accepted.predict.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_nodes", [2, 6, 64, 65])
def test_a_chain_shaped_tree_verifies_like_the_chain(device, num_nodes, dtype):
    torch.manual_seed(num_nodes)
    rng = random.Random(num_nodes)
    chains = [trees.chain(num_nodes)] * MAX_BATCH
    with_tree = make_sampler(num_nodes, device)
    without = make_sampler(num_nodes, device, tree=False)
    lengths = set()
    for _ in range(4):
        logits = random_logits(MAX_BATCH * num_nodes, device, dtype)
        tokens = torch.tensor(lucky_tokens(rng, chains, logits), dtype=torch.int32, device=device)
        as_tree = with_tree.verify(logits, tokens, tree=make_tree(chains, device))
        as_chain = without.verify(logits, tokens, tree=None)
        assert torch.equal(as_tree.accept_len, as_chain.accept_len)
        assert torch.equal(as_tree.predict, as_chain.predict)
        assert as_chain.path is None, "a chain keeps no path"
        for path, length in zip(as_tree.path.tolist(), as_tree.accept_len.tolist(), strict=True):
            assert path == [*range(length)] + [-1] * (num_nodes - length)
            lengths.add(length)
    assert len(lengths) > 1, "the cases must differ to mean anything"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 64, 65])
def test_random_trees_are_walked_along_the_argmax(device, num_nodes, dtype):
    torch.manual_seed(num_nodes + 100)
    rng = random.Random(num_nodes + 100)
    sampler = make_sampler(num_nodes, device)
    # Batches of other sizes in between must leave nothing behind.
    for size in (MAX_BATCH, 2, 3, 1, MAX_BATCH):
        parents = [trees.random_tree(rng, num_nodes) for _ in range(size)]
        logits = random_logits(size * num_nodes, device, dtype)
        tokens = lucky_tokens(rng, parents, logits)
        accepted = sampler.verify(
            logits, torch.tensor(tokens, dtype=torch.int32, device=device), tree=make_tree(parents, device)
        )
        targets = [
            [python_argmax(row) for row in request]
            for request in logits.view(size, num_nodes, VOCAB).tolist()
        ]
        expected = [walk(*request) for request in zip(tokens, parents, targets, strict=True)]
        assert as_lists(accepted) == tuple(list(column) for column in zip(*expected, strict=True))


@pytest.mark.parametrize("tree", [True, False])
def test_a_row_of_nan_logits_ends_the_path_with_minus_one(device, tree):
    # Row 2 is the first without numbers; its argmax would be the token of node 3.
    tokens = torch.tensor([[9, 1, 2, 0, 4]], dtype=torch.int32, device=device)
    logits = torch.zeros(5, VOCAB, device=device)
    logits[0, 1] = logits[1, 2] = logits[3, 4] = 1.0
    logits[2] = torch.tensor([2.0, 1.0, torch.nan, 1.0, 1.0])
    sampler = make_sampler(5, device, tree=tree)
    shape = make_tree([trees.chain(5)], device) if tree else None
    accepted = sampler.verify(logits, tokens, tree=shape)
    assert accepted.accept_len.tolist() == [3]
    assert accepted.predict.tolist() == [[1, 2, -1, -1, -1]]
    logits[0] = torch.nan
    accepted = sampler.verify(logits, tokens, tree=shape)
    assert (accepted.accept_len.tolist(), accepted.predict.tolist()) == ([1], [[-1] * 5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_go_to_the_lower_id_however_wide_the_row(device, dtype):
    vocab = 5000
    logits = torch.full((4, vocab), -torch.inf, dtype=dtype, device=device)
    logits[0, [4999, 4097, 63]] = 3.0
    logits[1, [1, 0]] = torch.inf
    logits[2, 4096] = -1e30
    # Row 3 is nothing but -inf: still numbers, so it has an argmax.
    sampler = make_sampler(4, device)
    assert sampler.target_tokens(logits).tolist() == [[63, 0, 4096, 0]]


def test_a_sampler_for_chains_refuses_a_tree(device):
    sampler = make_sampler(3, device, tree=False)
    tokens = torch.zeros(1, 3, dtype=torch.int32, device=device)
    with pytest.raises(AssertionError, match="built for chains"):
        sampler.verify(torch.zeros(3, VOCAB, device=device), tokens, tree=make_tree([trees.star(3)], device))
