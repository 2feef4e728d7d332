"""Invariant I12: the drafter scores, the tree selects; the same scores always give the same tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tests.oracles import trees
from tests.oracles.draft_tree import DraftTreeOracle
from trtllm_tree.tree.draft_tree import DraftedTree, DraftTree
from trtllm_tree.tree.lanes import TreeDraftInputs

MAX_BATCH, HIDDEN = 5, 3
# (K, S, N): the fewest and the most nodes, one and several mask words, a single step.
SHAPES = [(2, 2, 2), (2, 4, 15), (3, 1, 4), (4, 5, 16), (4, 5, 64), (8, 3, 65), (16, 2, 256)]


@dataclass
class Step:
    """One draft forward: scores and tokens [B, L, K], hidden rows [B, L, H]."""

    scores: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor

    def of(self, requests: Sequence[int]) -> Step:
        index = list(requests)
        return Step(self.scores[index], self.tokens[index], self.hidden[index])


class Drafting:
    """A `DraftTree` with the lanes that it writes."""

    def __init__(self, device: str, topk: int, num_steps: int, num_nodes: int) -> None:
        self.device, self.topk, self.num_steps, self.num_nodes = device, topk, num_steps, num_nodes
        self.lanes = TreeDraftInputs(MAX_BATCH, topk, num_steps, device)
        self.tree = DraftTree(
            MAX_BATCH,
            topk=topk,
            num_steps=num_steps,
            num_nodes=num_nodes,
            hidden_size=HIDDEN,
            dtype=torch.float32,
            device=device,
        )

    def random_steps(self, batch: int, *, coarse: bool = False) -> list[Step]:
        """Random draft forwards; `coarse` scores tie often, within and across lanes."""
        steps = []
        for step in range(self.num_steps):
            lanes = 1 if step == 0 else self.topk
            scores = -3.0 * torch.rand(batch, lanes, self.topk)
            if coarse:
                scores = (2 * scores).round() / 2
            tokens = torch.randint(0, 1000, (batch, lanes, self.topk), dtype=torch.int32)
            steps.append(Step(scores, tokens, torch.randn(batch, lanes, HIDDEN)))
        return steps

    def draft(self, steps: list[Step], roots: torch.Tensor) -> DraftedTree:
        for step, given in enumerate(steps):
            inputs = (given.scores, given.tokens, given.hidden)
            self.tree.expand(step, *(tensor.to(self.device) for tensor in inputs), self.lanes)
        return self.tree.select(roots.to(self.device))

    def check(self, steps: list[Step], roots: torch.Tensor) -> None:
        """Every returned number of every step equals the oracle's."""
        batch = roots.shape[0]
        oracles = [DraftTreeOracle(self.topk, self.num_steps) for _ in range(batch)]
        for step, given in enumerate(steps):
            inputs = (given.scores, given.tokens, given.hidden)
            tokens, hidden = self.tree.expand(
                step, *(tensor.to(self.device) for tensor in inputs), self.lanes
            )
            for request, oracle in enumerate(oracles):
                oracle.grow(given.scores[request].tolist(), given.tokens[request].tolist())
                assert tokens[request].tolist() == [oracle.entries[lane].token for lane in oracle.lanes[-1]]
                parents = given.hidden[request][oracle.parent_lanes[-1]]
                assert torch.equal(hidden[request].cpu(), parents)
        drafted = self.tree.select(roots.to(self.device))
        for request, oracle in enumerate(oracles):
            nodes = oracle.select(self.num_nodes, int(roots[request]))
            assert drafted.tokens[request].tolist() == [node.token for node in nodes]
            assert drafted.parents[request].tolist() == [node.parent for node in nodes]
            assert drafted.scores[request].tolist() == [node.score for node in nodes]


def as_lists(drafted: DraftedTree) -> list[tuple[list, list, list]]:
    rows = (drafted.tokens.tolist(), drafted.parents.tolist(), drafted.scores.tolist())
    return list(zip(*rows, strict=True))


def some_roots(batch: int) -> torch.Tensor:
    return torch.randint(0, 1000, (batch,), dtype=torch.int32)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), SHAPES)
def test_trees_equal_the_oracles_whatever_was_drafted_before(device, topk, num_steps, num_nodes, coarse):
    torch.manual_seed(num_nodes)
    drafting = Drafting(device, topk, num_steps, num_nodes)
    # One object, several rounds of other sizes: nothing may leak from one into the next.
    for batch in (MAX_BATCH, 2, 3):
        drafting.check(drafting.random_steps(batch, coarse=coarse), some_roots(batch))


def test_scores_above_zero_count_as_zero_and_a_child_never_beats_its_parent(device):
    torch.manual_seed(1)
    drafting = Drafting(device, 4, 4, 30)
    steps = drafting.random_steps(3)
    for step in steps:
        step.scores += 1.0
    drafting.check(steps, some_roots(3))
    for _, parents, scores in as_lists(drafting.draft(steps, some_roots(3))):
        assert all(scores[node] <= scores[parent] for node, parent in enumerate(parents) if parent >= 0)


def test_nodes_are_numbered_depth_first_and_the_likeliest_path_comes_first(device):
    torch.manual_seed(2)
    drafting = Drafting(device, 4, 5, 40)
    for _, parents, scores in as_lists(
        drafting.draft(drafting.random_steps(MAX_BATCH), some_roots(MAX_BATCH))
    ):
        children = {node: [c for c, p in enumerate(parents) if p == node] for node in range(40)}
        for node, below in children.items():
            # Depth first: the first child is the next node, and siblings stand in order of their score.
            assert not below or below[0] == node + 1
            assert [scores[child] for child in below] == sorted((scores[c] for c in below), reverse=True)
        best, node = [0], 0
        while children[node]:
            node = max(children[node], key=lambda child: scores[child])
            best.append(node)
        assert best == list(range(len(best)))


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_one_lane_gives_the_chain(device, num_steps):
    torch.manual_seed(3)
    drafting = Drafting(device, 1, num_steps, num_steps + 1)
    steps, roots = drafting.random_steps(3), some_roots(3)
    for request, (tokens, parents, _) in enumerate(as_lists(drafting.draft(steps, roots))):
        assert parents == trees.chain(num_steps + 1)
        assert tokens == [int(roots[request]), *(int(step.tokens[request, 0, 0]) for step in steps)]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 0.0])
def test_a_request_without_usable_scores_leaves_the_others_as_they_are(device, bad):
    # Bug B1: a missing parent must not read the next request's row, nor walk for ever.
    torch.manual_seed(4)
    drafting = Drafting(device, 3, 4, 20)
    steps, roots = drafting.random_steps(3), some_roots(3)
    alone = as_lists(drafting.draft([step.of([0, 2]) for step in steps], roots[[0, 2]]))
    for step in steps:
        step.scores[1] = bad
    drafted = as_lists(drafting.draft(steps, roots))
    assert [drafted[0], drafted[2]] == alone
    tokens, parents, scores = drafted[1]
    offered = {int(token) for step in steps for token in step.tokens[1].flatten()}
    assert tokens[0] == int(roots[1]) and set(tokens[1:]) <= offered
    assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert scores == [0.0] + [-math.inf if math.isnan(bad) else bad] * 19
    drafting.check(steps, roots)


def test_single_nan_scores_rank_last(device):
    torch.manual_seed(5)
    drafting = Drafting(device, 4, 4, 24)
    steps = drafting.random_steps(4)
    for step in steps:
        step.scores[torch.rand(step.scores.shape) < 0.3] = math.nan
    drafting.check(steps, some_roots(4))


def test_roots_may_be_strided_and_are_copied(device):
    torch.manual_seed(6)
    drafting = Drafting(device, 2, 3, 9)
    grid = torch.randint(0, 1000, (4, 6), dtype=torch.int32, device=device)
    roots = grid[:, 2]
    assert roots.stride(0) == 6
    drafting.check(drafting.random_steps(4), roots)
    drafted = drafting.tree.select(roots)
    before = drafted.tokens.clone()
    grid.fill_(-1)
    assert torch.equal(drafted.tokens, before)


def test_deep_paths_are_ranked_by_summed_log_probabilities(device):
    # Bug B5: as a product of probabilities every path here is zero after four steps, and all would tie.
    depth, topk = 10, 2
    drafting = Drafting(device, topk, depth, 1 + topk + (depth - 1) * topk**2)
    # The last child of the last lane is the best by 1/64 each step; all sums are exact in float32.
    steps = []
    for step in range(depth):
        lanes = 1 if step == 0 else topk
        scores = torch.tensor([-30.0 - 1 / 64, -30.0]).repeat(1, lanes, 1)
        tokens = torch.tensor([7, 9], dtype=torch.int32).repeat(1, lanes, 1)
        steps.append(Step(scores, tokens, torch.zeros(1, lanes, HIDDEN)))
    ((tokens, parents, scores),) = as_lists(drafting.draft(steps, torch.tensor([1], dtype=torch.int32)))
    assert max(trees.depths(parents)) == depth
    assert tokens[: depth + 1] == [1] + [9] * depth
    assert scores[: depth + 1] == [-30.0 * step for step in range(depth + 1)]
    for node, parent in enumerate(parents[1:], start=1):
        assert scores[node] == scores[parent] - 30.0 - (tokens[node] == 7) / 64


def test_a_smaller_batch_leaves_the_rows_behind_it_untouched(device):
    torch.manual_seed(7)
    drafting = Drafting(device, 4, 3, 12)
    drafting.draft(drafting.random_steps(MAX_BATCH), some_roots(MAX_BATCH))
    owned = [*vars(drafting.tree).values(), drafting.lanes.lane_mask]
    buffers = [value for value in owned if isinstance(value, torch.Tensor)]
    assert len(buffers) >= 10 and all(buffer.shape[0] == MAX_BATCH for buffer in buffers)
    before = [buffer.clone() for buffer in buffers]
    addresses = [buffer.data_ptr() for buffer in buffers]
    drafting.draft(drafting.random_steps(2), some_roots(2))
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer[2:], old[2:])
        assert not torch.equal(buffer[:2], old[:2]) or buffer.dtype == torch.int64
    assert [buffer.data_ptr() for buffer in buffers] == addresses
