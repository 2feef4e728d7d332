"""Invariants I1 and I14 at the sampling backends.

The tree is a parameter of the chain path: a chain-shaped tree verifies like the chain. Sampled, every node draws the
chain's token at its depth, whatever its row.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tests.oracles import trees
from tests.oracles.verify_walk import walk
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.kernels.sampled_tokens import sampled_tokens
from trtllm_tree.kernels.tree_ancestors import tree_ancestors
from trtllm_tree.sampling import gumbel
from trtllm_tree.sampling.base import Accepted
from trtllm_tree.sampling.greedy import GreedySampler
from trtllm_tree.sampling.gumbel import GumbelSampler, SlotDraws
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


NUM_SLOTS = 7
WIDE = 50
# By pool slot; the last is nobody's.
PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.5, top_k=9),
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.5, top_k=20, top_p=0.9, min_p=0.05),
]
SEEDS = [3, 2**64 - 1, 5, 2**63, 11, 0]


def make_draws(num_nodes: int, device: str) -> SlotDraws:
    draws = SlotDraws(NUM_SLOTS, MAX_BATCH * num_nodes, device=device)
    for slot, (params, seed) in enumerate(zip(PARAMS, SEEDS, strict=True)):
        draws.reset(slot, params, seed)
    return draws


def draw_alone(logits: torch.Tensor, slot: int, position: int) -> int:
    """The op on one row, with parameters written out here."""
    params = PARAMS[slot] if slot < len(PARAMS) else SamplingParams()
    seed = SEEDS[slot] if slot < len(PARAMS) else 0

    def one(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device=logits.device)

    return sampled_tokens(
        logits.unsqueeze(0),
        seeds=one(seed if seed < 2**63 else seed - 2**64, torch.int64),
        positions=one(position, torch.int64),
        temperatures=one(params.temperature or 0.0, torch.float32),
        top_ks=one(params.top_k or 0, torch.int32),
        top_ps=one(params.top_p or 1.0, torch.float32),
        min_ps=one(params.min_p or 0.0, torch.float32),
    ).item()


@pytest.mark.parametrize("num_nodes", [1, 6, 20])
def test_every_node_draws_its_requests_token_of_the_position_behind_it(device, num_nodes):
    torch.manual_seed(num_nodes)
    rng = random.Random(num_nodes)
    draws = make_draws(num_nodes, device)
    sampler = GumbelSampler(draws, MAX_BATCH, num_nodes, device=device, tree=True)
    committed = [0, 40, 2**33, 7, 19]
    for slots in ([4, 0, 2, 1, 3], [5, 6], [1]):
        parents = [trees.random_tree(rng, num_nodes) for _ in slots]
        tree = make_tree(parents, device)
        # As many rows draw the same logits as there are nodes: only what they are keyed by tells them apart.
        logits = torch.randn(len(slots), 1, WIDE, device=device).expand(-1, num_nodes, -1).reshape(-1, WIDE)
        positions = torch.tensor(committed[: len(slots)], device=device).unsqueeze(1) + tree.depths
        drawn = {
            (slot, vc + depth): draw_alone(logits[request * num_nodes], slot, vc + depth + 1)
            for request, (slot, vc) in enumerate(zip(slots, committed, strict=False))
            for depth in range(num_nodes)
        }
        targets = [
            [drawn[slot, position] for position in row]
            for slot, row in zip(slots, positions.tolist(), strict=True)
        ]
        got = draws.draw(logits, torch.tensor(slots, device=device), positions).view(-1, num_nodes)
        assert got.tolist() == targets
        # Mostly the draw behind the parent, so that paths get long.
        tokens = [
            [wanted[p] if rng.random() < 0.8 else rng.randrange(WIDE) for p in shape]
            for wanted, shape in zip(targets, parents, strict=True)
        ]
        accepted = sampler.verify(
            logits,
            torch.tensor(tokens, dtype=torch.int32, device=device),
            tree=tree,
            slots=torch.tensor(slots, device=device),
            positions=positions,
        )
        expected = [walk(*request) for request in zip(tokens, parents, targets, strict=True)]
        assert as_lists(accepted) == tuple(list(column) for column in zip(*expected, strict=True))


@pytest.mark.parametrize("num_nodes", [2, 6, 65])
def test_sampled_a_chain_shaped_tree_verifies_like_the_chain(device, num_nodes):
    torch.manual_seed(num_nodes)
    draws = make_draws(num_nodes, device)
    with_tree = GumbelSampler(draws, MAX_BATCH, num_nodes, device=device, tree=True)
    without = GumbelSampler(draws, MAX_BATCH, num_nodes, device=device, tree=False)
    slots = torch.tensor([3, 1, 0, 2, 5], device=device)
    positions = torch.tensor([[9], [0], [1], [64], [100]], device=device) + torch.arange(
        num_nodes, device=device
    )
    logits = torch.randn(MAX_BATCH * num_nodes, WIDE, device=device)
    tokens = torch.full((MAX_BATCH, num_nodes), 1, dtype=torch.int32, device=device)
    tokens[:, 1:] = draws.draw(logits, slots, positions).view(MAX_BATCH, num_nodes)[:, :-1]
    # The requests part from their draws at different rows.
    for request in range(MAX_BATCH):
        tokens[request, min(request + 1, num_nodes - 1)] = WIDE
    shape = make_tree([trees.chain(num_nodes)] * MAX_BATCH, device)
    as_tree = with_tree.verify(logits, tokens, tree=shape, slots=slots, positions=positions)
    as_chain = without.verify(logits, tokens, tree=None, slots=slots, positions=positions)
    assert as_chain.accept_len.tolist() == [min(i + 1, num_nodes - 1) for i in range(MAX_BATCH)]
    assert torch.equal(as_tree.accept_len, as_chain.accept_len)
    assert torch.equal(as_tree.predict, as_chain.predict)


def test_rows_at_temperature_zero_get_what_the_greedy_sampler_gives(device):
    torch.manual_seed(0)
    rng = random.Random(0)
    parents = [trees.random_tree(rng, 9) for _ in range(3)]
    logits = random_logits(27, device, torch.float32)
    tokens = torch.tensor(lucky_tokens(rng, parents, logits), dtype=torch.int32, device=device)
    draws = make_draws(9, device)
    sampler = GumbelSampler(draws, MAX_BATCH, 9, device=device, tree=True)
    tree = make_tree(parents, device)
    # A greedy request, a slot that was never set, and one that a greedy request took over.
    draws.reset(1, SamplingParams(top_k=3, seed=4), 4)
    slots = torch.tensor([2, 6, 1], device=device)
    got = sampler.verify(logits, tokens, tree=tree, slots=slots, positions=tree.depths.long())
    assert as_lists(got) == as_lists(make_sampler(9, device).verify(logits, tokens, tree=tree))


FILTERS = [
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.1),
]


@pytest.mark.parametrize("filtering", FILTERS)
def test_a_batch_takes_the_cheapest_op_that_serves_all_of_its_requests(monkeypatch, filtering):
    draws = SlotDraws(4, 8, device="cpu")
    draws.reset(0, SamplingParams(temperature=0.0, top_k=3), 1)
    draws.reset(1, SamplingParams(temperature=1.0, top_p=1.0), 2)
    draws.reset(2, filtering.resolved(), 3)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))

    def taken(slots: list[int]) -> list[str]:
        calls: list[str] = []

        def watch(op: str) -> Callable[..., torch.Tensor]:
            real = getattr(gumbel, op)

            def call(*args, filters: bool | None = None, **kwargs) -> torch.Tensor:
                calls.append(op if filters is None else f"{op} filters={filters}")
                return real(*args, **kwargs, **({} if filters is None else {"filters": filters}))

            return call

        with monkeypatch.context() as patch:
            for op in ("greedy_tokens", "sampled_tokens"):
                patch.setattr(gumbel, op, watch(op))
            draws.plan(slots)
            positions = torch.tensor([[5]] * len(slots))
            tokens = draws.draw(logits[: len(slots)], torch.tensor(slots), positions)
        assert tokens[0] == logits[0].argmax()
        return [draws.kind, *calls]

    assert taken([0, 3]) == ["greedy", "greedy_tokens"]
    assert taken([0, 1]) == ["plain", "sampled_tokens filters=False"]
    assert taken([0, 1, 2]) == ["filtered", "sampled_tokens filters=True"]
    draws.reset(2, SamplingParams(temperature=0.7), 4)
    assert taken([0, 1, 2]) == ["plain", "sampled_tokens filters=False"]
    draws.reset(1, SamplingParams(temperature=0.0), 3)
    assert taken([0, 1]) == ["greedy", "greedy_tokens"]
