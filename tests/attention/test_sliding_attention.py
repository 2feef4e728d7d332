"""Sliding windows and sinks through the cascade, against float64 attention over each row's own keys (invariant I5)."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.oracles import attention_paths as oracle
from tests.oracles import trees
from trtllm_tree.attention import cascade as cascade_module
from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.cascade import TreeCascade, TreeCascadeRows
from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.attention.leaves.registry import LEAVES, make_leaf
from trtllm_tree.attention.leaves.triton import TritonLeaf
from trtllm_tree.attention.sliding import slide
from trtllm_tree.errors import UnsupportedError
from trtllm_tree.support.leaf_rules import LEAF_RULES
from trtllm_tree.support.report import Refused, Supported

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SCALE = 0.3


class HostileLeaf(ReferenceLeaf):
    """A leaf that uses its freedom: a row that covers no key holds NaN, and an lse that looks good."""

    def sliding_prefix_decode(self, *args, **options):
        out, lse2 = super().sliding_prefix_decode(*args, **options)
        empty = lse2.isneginf()
        return out.masked_fill(empty.unsqueeze(3), math.nan), lse2.masked_fill(empty, 50.0)


def both_leaves() -> list[ReferenceLeaf]:
    return [kind(causal_prefix=causal) for kind in (ReferenceLeaf, HostileLeaf) for causal in (True, False)]


class Case:
    """Paged K/V in which only slots that a row of its own request sees are numbers, and the float64 truth.

    `positions[b]` are those of the rows, `columns[b]` those of the window's columns, `visible[b][r]` the columns that
    the mask shows row r. `own_tables` gives every row pages of its own for the prefix.
    """

    def __init__(
        self,
        device: str,
        prefix_lens: list[int],
        visible: list[list[list[int]]],
        row_depths: list[list[int]],
        column_depths: list[list[int]],
        *,
        window: int | None,
        sinks: bool = False,
        frozen: bool = False,
        page_size: int = 16,
        heads: tuple[int, int] = (4, 2),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        width, num_rows, batch = len(column_depths[0]), len(row_depths[0]), len(prefix_lens)
        torch.manual_seed(width + page_size + sum(prefix_lens))
        max_pages = -(-(max(prefix_lens) + width) // page_size)
        tables_each = 1 + num_rows if frozen else 1
        tables = 1 + torch.randperm(batch * tables_each * max_pages).view(batch, tables_each, max_pages).int()
        chosen = []
        for b, prefix in enumerate(prefix_lens):
            rows = []
            for r, depth in enumerate(row_depths[b]):
                last = prefix - 1 if frozen else prefix + depth
                first = 0 if window is None else max(0, last - window + 1)
                keys = [(1 + r if frozen else 0, slot) for slot in range(first, prefix)]
                for j in visible[b][r]:
                    if frozen or window is None or prefix + column_depths[b][j] > prefix + depth - window:
                        keys.append((0, prefix + j))
                rows.append(keys)
            chosen.append(rows)
        seen = torch.zeros(1 + tables.numel(), page_size, dtype=torch.bool)
        for b, rows in enumerate(chosen):
            for table, slot in (key for keys in rows for key in keys):
                seen[tables[b, table, slot // page_size], slot % page_size] = True
        pool = torch.randn(len(seen), 2, heads[1], page_size, 16)
        poison = torch.where(torch.rand(pool.shape) < 0.5, math.nan, math.inf)
        pool = torch.where(seen[:, None, None, :, None], pool, poison).to(device, dtype)
        self.args = (torch.randn(batch, num_rows, heads[0], 16).to(device, dtype), pool[:, 0], pool[:, 1])
        self.page_table = tables[:, 0].to(device)
        self.options = {"sliding_window": window}
        sink_values = torch.linspace(-2.0, 3.0, heads[0]) if sinks else None
        if sink_values is not None:
            self.options["sinks"] = sink_values.to(device)

        def tensor(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        mask = torch.stack([oracle.pack_bits(rows, width) for rows in visible]).to(device)
        self.rows = TreeCascadeRows(
            tensor(prefix_lens),
            mask,
            width,
            max(prefix_lens) + 2 * width,
            # A frozen window does not look at depths.
            row_depths=None if frozen else tensor(row_depths),
            column_depths=None if frozen else tensor(column_depths),
            row_page_table=tables[:, 1:].to(device) if frozen else None,
        )
        self.truth = oracle.chosen_attention(
            *self.args,
            tables.tolist(),
            chosen,
            scale=SCALE,
            sinks=None if sink_values is None else sink_values.tolist(),
        )

    def check(self, leaf: AttentionLeaf) -> None:
        cascade = TreeCascade(leaf)
        out = cascade.attend(*self.args, self.page_table, self.rows, SCALE, **self.options)
        error = (out.double() - self.truth).abs().max().item()
        assert error <= TOLERANCE[out.dtype], f"off by {error}"


def verify_case(device: str, num_nodes: int, prefix_lens: list[int], **options) -> Case:
    """Trees, the first a star and the last a chain; a node's position is its depth's, not its slot's."""
    rng = random.Random(num_nodes)
    shapes = [trees.random_tree(rng, num_nodes) for _ in prefix_lens]
    shapes[0], shapes[-1] = trees.star(num_nodes), trees.chain(num_nodes)
    visible = [[trees.path_to(parents, node) for node in range(num_nodes)] for parents in shapes]
    depths = [[len(path) - 1 for path in rows] for rows in visible]
    return Case(device, prefix_lens, visible, depths, depths, **options)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [1, 2, 8, 1000])
@pytest.mark.parametrize(
    ("num_nodes", "page_size", "heads"), [(1, 16, (2, 2)), (7, 32, (6, 2)), (17, 16, (4, 1))]
)
def test_a_node_slides_by_its_depth(device, num_nodes, page_size, heads, window, sinks):
    prefix_lens = [0, 1, num_nodes - 1, num_nodes, page_size, page_size + 5, 37]
    case = verify_case(
        device, num_nodes, prefix_lens, window=window, sinks=sinks, page_size=page_size, heads=heads
    )
    for leaf in both_leaves():
        case.check(leaf)


@pytest.mark.parametrize(("num_nodes", "window"), [(64, 8), (64, 63), (65, 2), (65, 64), (130, 70)])
def test_windows_over_trees_that_fill_or_exceed_a_mask_word(device, num_nodes, window):
    case = verify_case(device, num_nodes, [40, 64, 3], window=window, heads=(2, 1), page_size=32)
    for leaf in both_leaves():
        case.check(leaf)


@pytest.mark.parametrize("window", [2, None])
def test_sinks_and_windows_in_16_bit(device, window):
    case = verify_case(device, 9, [0, 5, 20], window=window, sinks=True, dtype=torch.bfloat16)
    for leaf in both_leaves():
        case.check(leaf)


def lane_case(device: str, topk: int, step: int, num_steps: int, **options) -> Case:
    """Lanes of `step`: one lane of each earlier step and the own slot; column (s - 1) * K + r has depth s - 1."""
    rng, prefix_lens = random.Random(topk), [0, 1, topk, 16, 19]
    visible = [
        [
            [*(s * topk + rng.randrange(topk) for s in range(step - 1)), (step - 1) * topk + lane]
            for lane in range(topk)
        ]
        for _ in prefix_lens
    ]
    rows = [[step - 1] * topk] * len(prefix_lens)
    columns = [[j // topk for j in range((num_steps - 1) * topk)]] * len(prefix_lens)
    return Case(device, prefix_lens, visible, rows, columns, **options)


@pytest.mark.parametrize("window", [1, 3, 100])
@pytest.mark.parametrize(("topk", "num_steps"), [(2, 2), (4, 5), (8, 10)])
def test_lanes_slide_by_their_step(device, topk, num_steps, window):
    for step in {1, num_steps - 1}:
        case = lane_case(device, topk, step, num_steps, window=window, sinks=step > 1)
        for leaf in both_leaves():
            case.check(leaf)


@pytest.mark.parametrize("window", [1, 3, 100, None])
@pytest.mark.parametrize(("topk", "num_steps"), [(2, 2), (4, 5), (8, 10)])
def test_a_window_frozen_at_the_prefixs_end_is_the_same_for_every_lane(device, topk, num_steps, window):
    """Every row finds the prefix through pages of its own, sees its last S keys, and all of its ancestors' slots."""
    for step in {1, num_steps - 1}:
        case = lane_case(device, topk, step, num_steps, window=window, frozen=True)
        for leaf in both_leaves():
            case.check(leaf)


def test_a_window_that_reaches_everything_changes_no_bit(device):
    case = verify_case(device, 9, [0, 5, 20], window=None)
    for leaf in both_leaves()[1::2]:
        args = (*case.args, case.page_table, case.rows, SCALE)
        cascade = TreeCascade(leaf)
        assert torch.equal(cascade.attend(*args, sliding_window=29), cascade.attend(*args))
        assert not torch.equal(cascade.attend(*args, sliding_window=20), cascade.attend(*args))


def test_what_a_window_leaves_is_derived_once_a_forward(device, monkeypatch):
    asked = []
    monkeypatch.setattr(cascade_module, "slide", lambda *args: asked.append(args[-1]) or slide(*args))
    case = verify_case(device, 5, [3, 4], window=None)
    for window in (2, None, 2, 7, 2):
        TreeCascade(ReferenceLeaf()).attend(
            *case.args, case.page_table, case.rows, SCALE, sliding_window=window
        )
    assert asked == [2, 7]


def test_a_leaf_refuses_the_call_of_a_layer_that_it_cannot_serve(device):
    case = verify_case(device, 5, [3, 4], window=2, sinks=True)
    leaf = TritonLeaf(torch.device(device))
    with pytest.raises(UnsupportedError) as caught:
        case.check(leaf)
    window, sinks = caught.value.problems
    assert (window.option, window.value) == ("attention layer: sliding_window", 2)
    assert sinks.option == "attention layer: sinks"
    assert "triton" in window.rule and "triton" in sinks.rule
    assert "reference" in window.remedy
    frozen = lane_case(device, 2, 1, 2, window=None, frozen=True)
    with pytest.raises(UnsupportedError, match="row_page_table"):
        frozen.check(leaf)


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_answer_for_layers_that_slide_or_have_sinks(name):
    shape = LeafShape(
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        page_size=32,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        sliding_window=True,
        sinks=True,
    )
    leaf = make_leaf(name, torch.device("cpu"), shape)
    rules = LEAF_RULES[name]
    assert (leaf.supports_sliding_window, leaf.supports_sinks) == (rules.sliding_window, rules.sinks)
    answer = leaf.tree_support().verify
    if name == "reference":
        assert answer == Supported()
        return
    assert isinstance(answer, Refused)
    assert "serves no sliding window" in answer.reason
    assert "serves no attention sinks" in answer.reason


def test_a_leaf_without_windows_has_no_sliding_partial():
    with pytest.raises(NotImplementedError, match="triton has no sliding window"):
        TritonLeaf(torch.device("cpu")).sliding_prefix_decode(
            *[torch.empty(0)] * 6, max_prefix_len=1, scale=1.0
        )
