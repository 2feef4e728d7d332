"""Invariant I5: one tree attention: the leaf's partial plus the window kernel is attention over all keys."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.oracles import attention_paths as oracle
from tests.oracles import trees
from trtllm_tree.attention.base import AttentionLeaf
from trtllm_tree.attention.cascade import TreeCascade, TreeCascadeRows
from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.attention.leaves.triton import TritonLeaf
from trtllm_tree.hosts.embedded.attention import default_leaf
from trtllm_tree.kernels.prefix_attention import prefix_attention
from trtllm_tree.support.report import Refused, Supported

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SCALE = 0.3


class HostileLeaf(ReferenceLeaf):
    """A leaf that uses its freedom: a row that covers no key holds NaN, and an lse that looks good."""

    def prefix_decode(self, q, k_cache, v_cache, page_table, prefix_lens, *, max_prefix_len, scale):
        out, lse2 = super().prefix_decode(
            q, k_cache, v_cache, page_table, prefix_lens, max_prefix_len=max_prefix_len, scale=scale
        )
        rows = torch.arange(q.shape[1], device=q.device)
        covered = prefix_lens.unsqueeze(1) + (rows - q.shape[1] + 1 if self.causal_prefix else 0 * rows)
        empty = (covered <= 0).unsqueeze(2).expand_as(lse2)
        return out.masked_fill(empty.unsqueeze(3), math.nan), lse2.masked_fill(empty, 50.0)


class Case:
    """Paged K/V in which only slots that a row of its own request sees are numbers, and the float64 truth."""

    def __init__(
        self,
        device: str,
        prefix_lens: list[int],
        visible: list[list[list[int]]],
        window: int,
        *,
        page_size: int = 16,
        heads: tuple[int, int] = (4, 2),
        dtype: torch.dtype = torch.float32,
        head_dim: int = 16,
    ) -> None:
        torch.manual_seed(window + page_size + sum(prefix_lens))
        batch, num_rows = len(prefix_lens), len(visible[0])
        max_pages = -(-(max(prefix_lens) + window) // page_size)
        table = 1 + torch.randperm(batch * max_pages).view(batch, max_pages).int()
        seen = torch.zeros(1 + batch * max_pages, page_size, dtype=torch.bool)
        for request, prefix in enumerate(prefix_lens):
            for position in {*range(prefix), *(prefix + j for row in visible[request] for j in row)}:
                seen[table[request, position // page_size], position % page_size] = True
        pool = torch.randn(len(seen), 2, heads[1], page_size, head_dim)
        pool = pool.masked_fill(~seen[:, None, None, :, None], math.nan).to(device, dtype)
        self.k_cache, self.v_cache = pool[:, 0], pool[:, 1]
        self.q = torch.randn(batch, num_rows, heads[0], head_dim).to(device, dtype)
        self.page_table = table.to(device)
        self.prefix_lens = torch.tensor(prefix_lens, dtype=torch.int32, device=device)
        mask = torch.stack([oracle.pack_bits(rows, window) for rows in visible]).to(device)
        # Hosts know a bound only, which may go past a request's pages.
        self.rows = TreeCascadeRows(self.prefix_lens, mask, window, max(prefix_lens) + 2 * window)
        self.truth = oracle.window_attention(
            self.q, self.k_cache, self.v_cache, self.page_table, prefix_lens, visible, scale=SCALE
        )

    def attend(self, leaf: AttentionLeaf) -> torch.Tensor:
        args = (self.q, self.k_cache, self.v_cache, self.page_table)
        return TreeCascade(leaf).attend(*args, self.rows, SCALE)

    def check(self, leaf: AttentionLeaf) -> None:
        out = self.attend(leaf)
        assert out.dtype == self.q.dtype
        error = (out.double() - self.truth).abs().max().item()
        assert error <= TOLERANCE[out.dtype], f"off by {error}"


def both_leaves() -> list[ReferenceLeaf]:
    return [kind(causal_prefix=causal) for kind in (ReferenceLeaf, HostileLeaf) for causal in (True, False)]


def verify_rows(num_nodes: int, batch: int) -> list[list[list[int]]]:
    """Random trees, one of them a star and one a chain: every node sees its root path."""
    rng = random.Random(num_nodes)
    shapes = [trees.random_tree(rng, num_nodes) for _ in range(batch)]
    shapes[0], shapes[-1] = trees.star(num_nodes), trees.chain(num_nodes)
    return [[trees.path_to(parents, node) for node in range(num_nodes)] for parents in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_nodes", "page_size", "heads"),
    [(1, 16, (2, 2)), (7, 16, (4, 2)), (8, 32, (6, 2)), (16, 64, (4, 1)), (17, 32, (2, 1))],
)
def test_verify_sees_the_prefix_and_each_nodes_root_path(device, num_nodes, page_size, heads, dtype):
    # Prefixes around the causal partial's edge (N) and around a page's.
    prefix_lens = [0, 1, num_nodes - 1, num_nodes, page_size - 1, page_size, page_size + 1, 2 * page_size + 5]
    visible = verify_rows(num_nodes, len(prefix_lens))
    case = Case(device, prefix_lens, visible, num_nodes, page_size=page_size, heads=heads, dtype=dtype)
    for leaf in both_leaves():
        case.check(leaf)


@pytest.mark.parametrize(("num_nodes", "prefix_lens"), [(64, [63, 64, 3]), (65, [0, 64, 65])])
def test_verify_of_trees_that_fill_or_exceed_a_mask_word(device, num_nodes, prefix_lens):
    case = Case(device, prefix_lens, verify_rows(num_nodes, 3), num_nodes, heads=(2, 1), page_size=32)
    for leaf in both_leaves():
        case.check(leaf)


def lane_rows(rng: random.Random, topk: int, step: int) -> list[list[int]]:
    """Window columns of the lanes of `step`: one lane of each earlier step, and the own slot."""
    return [
        [*(earlier * topk + rng.randrange(topk) for earlier in range(step - 1)), (step - 1) * topk + lane]
        for lane in range(topk)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("topk", "num_steps", "page_size", "heads"),
    [(2, 2, 16, (4, 2)), (4, 4, 32, (4, 1)), (8, 5, 64, (2, 2)), (8, 10, 16, (2, 1))],
)
def test_lanes_see_the_frontier_and_their_ancestors_slots(device, topk, num_steps, page_size, heads, dtype):
    rng = random.Random(topk)
    window = (num_steps - 1) * topk
    prefix_lens = [0, 1, topk - 1, topk, page_size, page_size + 3]
    for step in {1, num_steps - 1}:
        # Later steps' slots are not written yet: NaN, as every slot that no lane sees.
        visible = [lane_rows(rng, topk, step) for _ in prefix_lens]
        case = Case(device, prefix_lens, visible, window, page_size=page_size, heads=heads, dtype=dtype)
        for leaf in both_leaves():
            case.check(leaf)


@pytest.mark.parametrize("num_nodes", [1, 8, 65])
def test_a_chain_shaped_mask_is_causal_attention(device, num_nodes):
    prefix_lens = [0, 5, num_nodes, 40]
    chains = [[list(range(node + 1)) for node in range(num_nodes)]] * len(prefix_lens)
    case = Case(device, prefix_lens, chains, num_nodes)
    causal, _ = prefix_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.prefix_lens + num_nodes,
        causal=True,
        max_kv_len=max(prefix_lens) + num_nodes,
        scale=SCALE,
    )
    for leaf in both_leaves():
        torch.testing.assert_close(case.attend(leaf), causal, atol=1e-5, rtol=0)


def test_a_siblings_key_changes_nothing(device):
    # Nodes 1 and 2 are siblings: node 2's row must not move when node 1's key and value do.
    visible = [[[0], [0, 1], [0, 2], [0, 2, 3]]]
    case = Case(device, [9], visible, 4)
    for leaf in both_leaves():
        before = case.attend(leaf).clone()
        page, offset = case.page_table[0, 0].item(), 9 + 1
        case.k_cache[page, :, offset] += 1.0
        case.v_cache[page, :, offset] -= 2.0
        after = case.attend(leaf)
        assert torch.equal(after[0, [0, 2, 3]], before[0, [0, 2, 3]])
        assert not torch.equal(after[0, 1], before[0, 1])


@pytest.fixture
def triton_leaf(device, monkeypatch) -> TritonLeaf:
    """The one-pass leaf, interpreted where there is no GPU."""
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    return TritonLeaf(torch.device(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_nodes", "page_size", "heads"), [(1, 16, (2, 2)), (7, 64, (4, 2)), (17, 32, (2, 1))]
)
def test_the_one_pass_leaf_verifies_trees(device, triton_leaf, num_nodes, page_size, heads, dtype):
    prefix_lens = [0, num_nodes, page_size - 1, page_size, 2 * page_size + 5]
    visible = verify_rows(num_nodes, len(prefix_lens))
    Case(device, prefix_lens, visible, num_nodes, page_size=page_size, heads=heads, dtype=dtype).check(
        triton_leaf
    )


@pytest.mark.parametrize(("topk", "num_steps"), [(4, 4), (8, 10)])
def test_the_one_pass_leaf_attends_lanes(device, triton_leaf, topk, num_steps):
    rng = random.Random(topk)
    prefix_lens = [0, topk, 67]
    for step in (1, num_steps - 1):
        visible = [lane_rows(rng, topk, step) for _ in prefix_lens]
        Case(device, prefix_lens, visible, (num_steps - 1) * topk).check(triton_leaf)


def test_the_one_pass_leaf_gives_no_partial_and_the_others_no_pass(triton_leaf):
    with pytest.raises(NotImplementedError, match="triton"):
        triton_leaf.prefix_decode(*[torch.empty(0)] * 5, max_prefix_len=1, scale=1.0)
    with pytest.raises(NotImplementedError, match="reference"):
        ReferenceLeaf().tree_decode(*[torch.empty(0)] * 6, window=1, scale=1.0)


def test_the_one_pass_leaf_refuses_devices_it_cannot_serve(monkeypatch):
    answer = TritonLeaf(torch.device("cpu")).tree_support()
    assert isinstance(answer.verify, Refused)
    assert answer.lanes == answer.verify
    assert "cpu" in answer.verify.reason
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    assert TritonLeaf(torch.device("cpu")).tree_support().verify == Supported()

    on_gpu = TritonLeaf(torch.device("cuda"))
    for capability, expected in (((7, 5), Refused), ((8, 0), Supported), ((9, 0), Supported)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert isinstance(on_gpu.tree_support().verify, expected)


def test_the_default_leaf_follows_the_device_and_is_logged(caplog, monkeypatch):
    with caplog.at_level("INFO"):
        assert isinstance(default_leaf("cpu"), ReferenceLeaf)
        for capability, leaf in (((9, 0), TritonLeaf), ((7, 5), ReferenceLeaf)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
            assert isinstance(default_leaf("cuda:0"), leaf)
    chosen = [record.message.rpartition(" ")[2] for record in caplog.records]
    assert chosen == ["reference", "triton", "reference"]
