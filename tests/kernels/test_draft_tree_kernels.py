"""draft_tree_expand and draft_tree_select, as torch references and Triton kernels, against plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.oracles.draft_tree import DraftTreeOracle, Entry, float32
from trtllm_tree.kernels.draft_tree_expand import draft_tree_expand, first_entry
from trtllm_tree.kernels.draft_tree_select import draft_tree_select

GARBAGE = -12345
HIDDEN = 70
INF, NAN = math.inf, math.nan
SHAPES = [
    # (B, K, S, N)
    (3, 1, 5, 6),
    (4, 4, 4, 16),
    (2, 8, 5, 64),
    (3, 3, 6, 20),
    (2, 16, 5, 65),
    (1, 16, 6, 128),
]

# Triton's interpreter warns where IEEE arithmetic gives an infinity or NaN; here that is the point.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["reference", "triton"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_TREE_KERNELS", request.param)


def smooth(rng: random.Random) -> float:
    return -rng.expovariate(0.5)


def tied(rng: random.Random) -> float:
    return -float(rng.randrange(3))


def nearly_tied(rng: random.Random) -> float:
    return -1.0 - 4e-7 * rng.randrange(3)


def hostile(rng: random.Random) -> float:
    return rng.choice((NAN, -INF, INF, 0.5, -0.0, 0.0, -0.5, -1.0, float32(-3e38)))


def hopeless(rng: random.Random) -> float:
    return NAN


@dataclass
class Buffers:
    """What one drafter owns: garbage-filled, batch-strided views, so that every write shows."""

    entry_scores: torch.Tensor
    entry_tokens: torch.Tensor
    entry_parents: torch.Tensor
    lane_entries: torch.Tensor
    lane_scores: torch.Tensor
    lane_tokens: torch.Tensor
    lane_mask: torch.Tensor

    @classmethod
    def create(cls, batch: int, topk: int, num_steps: int, device: str) -> Buffers:
        def strided(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            fill = NAN if dtype.is_floating_point else GARBAGE
            return torch.full((batch, *(size + 2 for size in shape)), fill, dtype=dtype, device=device)[
                (slice(None), *(slice(size) for size in shape))
            ]

        entries, words = first_entry(num_steps, topk), max(1, -(-(num_steps - 1) * topk // 64))
        return cls(
            strided(entries, dtype=torch.float32),
            strided(entries, dtype=torch.int32),
            strided(entries, dtype=torch.int32),
            strided(topk, dtype=torch.int32),
            strided(topk, dtype=torch.float32),
            strided(topk, dtype=torch.int32),
            strided(topk, words, dtype=torch.int64),
        )

    def check(self, oracles: list[DraftTreeOracle]) -> None:
        """Every element equals the oracles' trees, and entries not recorded yet are untouched."""
        words = self.lane_mask.shape[-1]
        for b, oracle in enumerate(oracles):
            done, lanes = len(oracle.entries), oracle.lanes[-1]
            assert self.entry_scores[b, :done].tolist() == [entry.score for entry in oracle.entries]
            assert self.entry_tokens[b, :done].tolist() == [entry.token for entry in oracle.entries]
            assert self.entry_parents[b, :done].tolist() == [entry.parent for entry in oracle.entries]
            assert self.entry_scores[b, done:].isnan().all()
            assert (self.entry_tokens[b, done:] == GARBAGE).all()
            assert (self.entry_parents[b, done:] == GARBAGE).all()
            assert self.lane_entries[b].tolist() == lanes
            assert self.lane_scores[b].tolist() == [oracle.entries[lane].score for lane in lanes]
            assert self.lane_tokens[b].tolist() == [oracle.entries[lane].token for lane in lanes]
            unsigned = [[word % 2**64 for word in row] for row in self.lane_mask[b].tolist()]
            assert unsigned == [
                [mask >> 64 * w & (2**64 - 1) for w in range(words)] for mask in oracle.lane_masks()
            ]


def grow(
    topk: int, num_steps: int, draws: list[Callable[[random.Random], float]], device: str
) -> tuple[Buffers, list[DraftTreeOracle]]:
    """Grow one tree per element of `draws`, which draws its scores, and check it after each step."""
    rng = random.Random(1000 * topk + num_steps)
    batch = len(draws)
    buffers = Buffers.create(batch, topk, num_steps, device)
    oracles = [DraftTreeOracle(topk, num_steps) for _ in draws]
    for step in range(num_steps):
        lanes = 1 if step == 0 else topk
        scores = [[[draw(rng) for _ in range(topk)] for _ in range(lanes)] for draw in draws]
        tokens = [[[rng.randrange(50) for _ in range(topk)] for _ in range(lanes)] for _ in draws]
        hidden = torch.randn(batch, lanes, HIDDEN).to(device, torch.bfloat16)
        next_hidden = torch.full((batch, topk, HIDDEN + 1), NAN, dtype=torch.bfloat16, device=device)[
            ..., :HIDDEN
        ]
        for oracle, request_scores, request_tokens in zip(oracles, scores, tokens, strict=True):
            oracle.grow(request_scores, request_tokens)
        draft_tree_expand(
            torch.tensor(scores, device=device),
            torch.tensor(tokens, dtype=torch.int32, device=device),
            hidden,
            step=step,
            **vars(buffers),
            next_hidden=next_hidden,
            window=(num_steps - 1) * topk,
        )
        buffers.check(oracles)
        for b, oracle in enumerate(oracles):
            assert torch.equal(next_hidden[b], hidden[b, oracle.parent_lanes[-1]])
    return buffers, oracles


def select_and_check(
    oracles: list[DraftTreeOracle],
    scores: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: int,
) -> torch.Tensor:
    """Select into garbage and into maps, with a strided column of root tokens; returns the node parents [B, N]."""
    batch, device = len(oracles), scores.device
    roots = torch.full((batch, 7), GARBAGE, dtype=torch.int32, device=device)
    roots[:, 3] = torch.arange(900, 900 + batch)
    node_tokens = torch.full((batch, num_nodes + 1), GARBAGE, dtype=torch.int32, device=device)
    node_parents = torch.full((batch, num_nodes + 2), GARBAGE, dtype=torch.int32, device=device)
    node_scores = torch.full((batch, num_nodes + 3), NAN, device=device)
    # Pool slots in falling order, with an untouched slot on either side and between them.
    slots = [2 * (batch - b) - 1 for b in range(batch)]
    maps = torch.full((2, 2 * batch + 1, num_nodes + 4), GARBAGE, dtype=torch.int32, device=device)
    draft_tree_select(
        scores,
        tokens,
        parents,
        roots[:, 3],
        num_nodes=num_nodes,
        slots=torch.tensor(slots, device=device),
        future_tokens=maps[0][:, :num_nodes],
        future_parents=maps[1][:, :num_nodes],
        tokens=node_tokens[:, :num_nodes],
        parents=node_parents[:, :num_nodes],
        node_scores=node_scores[:, :num_nodes],
    )
    for b, oracle in enumerate(oracles):
        nodes = oracle.select(num_nodes, 900 + b)
        assert node_tokens[b].tolist() == [node.token for node in nodes] + [GARBAGE]
        assert node_parents[b].tolist() == [node.parent for node in nodes] + [GARBAGE] * 2
        assert node_scores[b, :num_nodes].tolist() == [node.score for node in nodes]
        assert node_scores[b, num_nodes:].isnan().all()
    for future, selected in zip(maps, (node_tokens, node_parents), strict=True):
        expected = torch.full_like(future, GARBAGE)
        expected[slots, :num_nodes] = selected[:, :num_nodes]
        assert torch.equal(future, expected)
    return node_parents[:, :num_nodes]


def entry_tensors(
    oracles: list[DraftTreeOracle], device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The oracles' entry tables as (scores, tokens, parents)."""
    scores = [[entry.score for entry in oracle.entries] for oracle in oracles]
    tokens = [[entry.token for entry in oracle.entries] for oracle in oracles]
    parents = [[entry.parent for entry in oracle.entries] for oracle in oracles]
    return (
        torch.tensor(scores, device=device),
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(parents, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("draw", [smooth, tied])
@pytest.mark.parametrize(("batch", "topk", "num_steps", "num_nodes"), SHAPES)
def test_trees_grow_and_are_selected_like_the_oracle(batch, topk, num_steps, num_nodes, draw, device):
    if topk == 1:
        num_nodes = num_steps + 1
    buffers, oracles = grow(topk, num_steps, [draw] * batch, device)
    parents = select_and_check(
        oracles, buffers.entry_scores, buffers.entry_tokens, buffers.entry_parents, num_nodes
    )
    if topk == 1:
        assert parents.tolist() == [list(range(-1, num_steps))] * batch


@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(4, 4, 16), (3, 6, 32)])
def test_near_ties_nan_and_infinite_scores_keep_the_order_and_the_tree(topk, num_steps, num_nodes, device):
    buffers, oracles = grow(topk, num_steps, [nearly_tied, hostile, hopeless, smooth], device)
    select_and_check(oracles, buffers.entry_scores, buffers.entry_tokens, buffers.entry_parents, num_nodes)


def test_a_tree_worked_by_hand(device):
    scores = torch.tensor([[-0.5, -0.25, -1.0, -0.5, -0.5, -0.5]], device=device)
    parents = torch.tensor([[-1, -1, 1, 1, 0, 0]], dtype=torch.int32, device=device)
    tokens = torch.arange(10, 16, dtype=torch.int32, device=device)[None]
    roots = torch.tensor([7], dtype=torch.int32, device=device)
    # Best first: 1 (-0.25), then 0, 3, 4, 5 (-0.5 each); 2 is left out.
    got = draft_tree_select(scores, tokens, parents, roots, num_nodes=6)
    assert got[0].tolist() == [[7, 11, 13, 10, 14, 15]]
    assert got[1].tolist() == [[-1, 0, 1, 0, 3, 3]]
    assert got[2].tolist() == [[0.0, -0.25, -0.5, -0.5, -0.5, -0.5]]


@pytest.mark.parametrize("num_nodes", [1, 2, 33, 64])
def test_entries_of_any_content_give_a_tree_with_orphans_on_the_root(num_nodes, device):
    rng = random.Random(num_nodes)
    outside = (-1, -2, 63, 64, -(2**31), 2**31 - 1)
    oracles = []
    for _ in range(3):
        links = [rng.choice((rng.randrange(63), rng.choice(outside))) for _ in range(63)]
        draw = rng.choice((tied, hostile))
        oracles.append(
            DraftTreeOracle(1, 1, [Entry(draw(rng), rng.randrange(50), parent) for parent in links])
        )
    scores, tokens, parents = entry_tensors(oracles, device)
    for oracle in oracles:
        oracle.entries = [
            Entry(-INF if math.isnan(e.score) else e.score, e.token, e.parent) for e in oracle.entries
        ]
    select_and_check(oracles, scores, tokens, parents, num_nodes)


@pytest.mark.parametrize(("num_nodes", "draw"), [(256, tied), (69, smooth)])
def test_the_largest_entry_table(num_nodes, draw, device):
    rng = random.Random(num_nodes)
    oracle = DraftTreeOracle(16, 10)
    for step in range(10):
        lanes = 1 if step == 0 else 16
        oracle.grow(
            [[draw(rng) for _ in range(16)] for _ in range(lanes)],
            [[rng.randrange(99) for _ in range(16)] for _ in range(lanes)],
        )
    assert len(oracle.entries) == 2320
    select_and_check([oracle], *entry_tensors([oracle], device), num_nodes)


def test_hidden_rows_must_not_be_gathered_onto_themselves(device):
    buffers = Buffers.create(1, 1, 2, device)
    hidden = torch.zeros(1, 1, 4, device=device)
    scores = torch.zeros(1, 1, 1, device=device)
    with pytest.raises(AssertionError, match="alias"):
        draft_tree_expand(scores, scores.int(), hidden, step=0, **vars(buffers), next_hidden=hidden, window=1)


def test_pad_rows_may_share_a_slot_and_still_get_their_own_outputs(device):
    """Their common row may mix theirs: any of their tokens, each below a lower node."""
    torch.manual_seed(0)
    scores = -torch.rand(4, 20, device=device)
    tokens = torch.arange(80, dtype=torch.int32, device=device).view(4, 20)
    parents = torch.full((4, 20), -1, dtype=torch.int32, device=device)
    parents[:, 4:] = torch.arange(16, device=device) % 4
    scores[:, 4:] -= 1.0
    roots = torch.tensor([80, 81, 82, 83], dtype=torch.int32, device=device)
    maps = torch.full((2, 3, 9), GARBAGE, dtype=torch.int32, device=device)
    alone = draft_tree_select(scores, tokens, parents, roots, num_nodes=9)
    slots = torch.tensor([2, 0, 2, 2], device=device)
    shared = draft_tree_select(
        scores,
        tokens,
        parents,
        roots,
        num_nodes=9,
        slots=slots,
        future_tokens=maps[0],
        future_parents=maps[1],
    )
    assert all(torch.equal(one, other) for one, other in zip(alone, shared, strict=True))
    assert torch.equal(maps[0, 0], shared[0][1]) and torch.equal(maps[1, 0], shared[1][1])
    assert (maps[:, 1] == GARBAGE).all()
    pads = [0, 2, 3]
    for kind in (0, 1):
        for node in range(9):
            assert maps[kind, 2, node] in shared[kind][pads, node]
