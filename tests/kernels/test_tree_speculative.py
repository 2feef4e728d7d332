"""The three kernels of a verify round: the window attention, the greedy walk, the row compaction.

Each against a slow oracle, as torch reference and as Triton kernel (interpreted where there is no GPU).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.oracles import attention_paths as oracle
from tests.oracles.verify_walk import walk
from trtllm_tree.kernels.compact_window_rows import RowTable, compact_window_rows
from trtllm_tree.kernels.compact_window_rows.reference import reference as compact_reference
from trtllm_tree.kernels.compact_window_rows.triton import launch as compact_triton
from trtllm_tree.kernels.tree_window_attention import tree_window_attention
from trtllm_tree.kernels.tree_window_attention.reference import reference as window_reference
from trtllm_tree.kernels.tree_window_attention.triton import launch as window_triton
from trtllm_tree.kernels.verify_tree import verify_tree
from trtllm_tree.kernels.verify_tree.reference import reference as verify_reference
from trtllm_tree.kernels.verify_tree.triton import launch as verify_triton

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
TOLERANCE = {BF16: 2e-2, FP16: 2e-3, FP32: 1e-5}
SHORT, MIXED, EDGE = [1, 2, 64], [5, 70, 131], [0, 3, 40]


def random_parents(rng: random.Random, num_nodes: int) -> list[int]:
    """A tree in which every node but the root has an earlier parent; recent ones are likelier."""
    return [-1] + [max(rng.randrange(j), rng.randrange(j)) for j in range(1, num_nodes)]


def ancestors(parents: list[int]) -> list[list[int]]:
    """For every node, itself and all nodes above it."""
    rows: list[list[int]] = []
    for node, parent in enumerate(parents):
        rows.append([node] + (rows[parent] if parent >= 0 else []))
    return rows


@dataclass
class Window:
    """Inputs of one `tree_window_attention` call, and its true output."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    truth: torch.Tensor

    def check(self, run: Callable[..., None], **extra: int | None) -> None:
        q = self.args[0]
        out = torch.full_like(q, math.nan)
        run(*self.args, **self.options, out=out, **extra)
        error = (out.double() - self.truth).abs().max().item()
        assert error <= TOLERANCE[q.dtype], f"off by {error}"


def make_window(
    device: str,
    prefix_lens: list[int],
    visible: list[list[list[int]]],
    window: int,
    *,
    causal: bool,
    page_size: int = 16,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    dtype: torch.dtype = FP32,
    cache_dtype: torch.dtype | None = None,
    partial_dtype: torch.dtype | None = None,
    missing_pages: int = 0,
) -> Window:
    """Random call; every slot that no row of its request sees holds NaN or infinity, in K and in V.

    The last `missing_pages` pages of each request are not allocated; then the dummy page is finite.
    """
    torch.manual_seed(sum(prefix_lens) + window + head_dim)
    cache_dtype = cache_dtype or dtype
    batch, num_rows, (num_heads, num_kv_heads) = len(prefix_lens), len(visible[0]), heads
    max_pages = -(-(max(prefix_lens) + window) // page_size)
    num_pages = 1 + batch * max_pages
    # A wider table whose rows are cut: the row stride exceeds max_pages.
    wide = torch.full((batch, max_pages + 3), num_pages - 1, dtype=torch.int32)
    wide[:, :max_pages] = 1 + torch.randperm(batch * max_pages).reshape(batch, max_pages).int()
    page_table = wide[:, : max_pages - missing_pages]
    if missing_pages:
        page_table[0, -1] = -1

    pool = torch.randn(num_pages, 2, num_kv_heads, page_size, head_dim)
    seen = torch.zeros(num_pages, page_size, dtype=torch.bool)
    seen[0] = missing_pages > 0
    for b, prefix in enumerate(prefix_lens):
        columns = {prefix + j for row in visible[b] for j in row}
        for position in {*range(prefix), *columns}:
            index = position // page_size
            page = max(int(page_table[b, index]), 0) if index < page_table.shape[1] else 0
            seen[page, position % page_size] = True
    poison = torch.tensor([math.nan, math.inf])[torch.randint(2, pool.shape)]
    # e4m3fn has no infinity: casting one gives NaN.
    pool = torch.where(seen[:, None, None, :, None], pool, poison).to(cache_dtype).to(device)
    k_cache, v_cache = pool[:, 0], pool[:, 1]

    q = torch.randn(batch, num_rows, num_heads, head_dim, device=device).to(dtype)
    mask = torch.stack([oracle.pack_bits(rows, window) for rows in visible]).to(device)
    page_table = wide.to(device)[:, : max_pages - missing_pages]
    scale = head_dim**-0.5
    prefix_out, prefix_lse2 = oracle.prefix_partial(
        q, k_cache, v_cache, page_table, prefix_lens, causal=causal, scale=scale
    )
    truth = oracle.window_attention(q, k_cache, v_cache, page_table, prefix_lens, visible, scale=scale)
    lens = torch.tensor(prefix_lens, dtype=torch.int32, device=device)
    partial = prefix_out.to(partial_dtype or dtype)
    args = (q, k_cache, v_cache, page_table, lens, mask, partial, prefix_lse2.float())
    return Window(args, {"window": window, "causal_prefix": causal, "scale": scale}, truth)


def tree_window(device: str, num_nodes: int, prefix_lens: list[int], **kwargs) -> Window:
    """A verify window: R = W = N, every row sees its ancestors."""
    rng = random.Random(num_nodes)
    visible = [ancestors(random_parents(rng, num_nodes)) for _ in prefix_lens]
    return make_window(device, prefix_lens, visible, num_nodes, **kwargs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("prefix_lens", [MIXED, SHORT, EDGE])
@pytest.mark.parametrize(
    ("num_nodes", "page_size", "block_m"),
    # The widest tile keeps the interpreter's program count low.
    [(n, 16 << i % 3, 64 if n >= 64 else None) for i, n in enumerate((1, 4, 8, 16, 17, 32, 64, 65, 128))],
)
def test_a_tree_window_equals_attention_over_all_visible_keys(
    device, num_nodes, page_size, block_m, prefix_lens, causal
):
    case = tree_window(device, num_nodes, prefix_lens, causal=causal, page_size=page_size)
    case.check(window_reference)
    case.check(window_triton, block_m=block_m)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("topk", "window"), [(2, 12), (4, 12), (8, 32), (16, 64), (1, 6)])
def test_a_lane_window_equals_attention_over_all_visible_keys(device, topk, window, causal):
    rng = random.Random(topk)
    # No lane sees the last column, and one lane of the first request sees nothing.
    visible = [[rng.sample(range(window - 1), 4) for _ in range(topk)] for _ in EDGE]
    visible[0][topk - 1] = []
    case = make_window(device, EDGE, visible, window, causal=causal, heads=(4, 2))
    assert not case.truth[0, topk - 1].any()
    case.check(window_reference)
    case.check(window_triton)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (3, 64), (5, 80), (7, 96), (8, 64), (16, 256)])
def test_every_head_ratio_and_head_size_is_right(device, group, head_dim):
    case = tree_window(device, 9, [21], causal=True, heads=(2 * group, 2), head_dim=head_dim)
    case.check(window_reference)
    case.check(window_triton)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "partial_dtype"),
    [(BF16, BF16, BF16), (BF16, BF16, FP32), (FP16, FP16, FP32), (BF16, FP8, BF16), (FP16, FP8, FP16)],
)
def test_low_precision_inputs_are_accumulated_in_float32(device, dtype, cache_dtype, partial_dtype, causal):
    dtypes = {"dtype": dtype, "cache_dtype": cache_dtype, "partial_dtype": partial_dtype}
    case = tree_window(device, 17, [3, 40], causal=causal, heads=(8, 2), head_dim=128, **dtypes)
    case.check(window_reference)
    case.check(window_triton)


def test_positions_without_a_page_are_read_from_the_dummy_page(device):
    case = tree_window(device, 20, [30, 31], causal=True, missing_pages=1)
    case.check(window_reference)
    case.check(window_triton)


def test_bits_beyond_the_window_are_ignored(device):
    case = tree_window(device, 12, [5], causal=True)
    case.args[5].bitwise_or_(-1 << 12)
    case.check(window_reference)
    case.check(window_triton)


def test_the_op_allocates_its_output_or_overwrites_the_partial(device):
    case = tree_window(device, 6, [7, 2], causal=True)
    torch.testing.assert_close(
        tree_window_attention(*case.args, **case.options).double(), case.truth, atol=1e-5, rtol=0
    )
    for run in (window_reference, window_triton):
        partial = case.args[6].clone()
        args = [*case.args]
        args[6] = partial
        run(*args, **case.options, out=partial)
        torch.testing.assert_close(partial.double(), case.truth, atol=1e-5, rtol=0)
    with pytest.raises(AssertionError, match="mask must be"):
        tree_window_attention(*case.args, **case.options | {"window": 65})


def check_verify(
    device: str, tokens: list[list[int]], parents: list[list[int]], targets: list[list[int]]
) -> None:
    expected = [walk(*request) for request in zip(tokens, parents, targets, strict=True)]
    # Every input is a slice of something wider, so that strides matter.
    inputs = [
        torch.tensor(rows, dtype=torch.int32).repeat(1, 2).to(device)[:, : len(rows[0])]
        for rows in (tokens, parents, targets)
    ]
    for run in (verify_reference, verify_triton):
        outputs = {
            "path": torch.full_like(inputs[0], 77),
            "accept_len": torch.full((len(tokens),), 77, dtype=torch.int32, device=device),
            "predict": torch.full_like(inputs[0], 77),
        }
        run(*inputs, **outputs)
        for i, name in enumerate(("path", "accept_len", "predict")):
            assert outputs[name].tolist() == [request[i] for request in expected], (
                f"{name} of {run.__module__}"
            )


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 16, 64, 65, 128, 256])
@pytest.mark.parametrize("vocabulary", [1, 2, 4])
def test_verify_walks_random_trees_like_the_rule(device, num_nodes, vocabulary):
    # Tiny vocabularies: many matches, many duplicate siblings; some targets are NaN rows (-1).
    rng = random.Random(num_nodes + 1000 * vocabulary)
    parents = [random_parents(rng, num_nodes) for _ in range(4)] + [list(range(-1, num_nodes - 1))]
    tokens = [[rng.randrange(vocabulary) for _ in range(num_nodes)] for _ in parents]
    targets = [[rng.choice([*range(vocabulary)] * 4 + [-1]) for _ in range(num_nodes)] for _ in parents]
    check_verify(device, tokens, parents, targets)


def test_verify_accepts_all_of_a_chain_and_nothing_of_a_stranger(device):
    chain, star = [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]
    tokens = [9, 1, 2, 3, 4]
    everything, nothing, last = [1, 2, 3, 4, 5], [7, 7, 7, 7, 7], [4, 0, 0, 0, 8]
    requests = [(tokens, chain, everything), (tokens, chain, nothing), (tokens, star, last)]
    assert [walk(*request)[0] for request in requests] == [
        [0, 1, 2, 3, 4],
        [0, -1, -1, -1, -1],
        [0, 4, -1, -1, -1],
    ]
    check_verify(device, *(list(column) for column in zip(*requests, strict=True)))


def test_verify_takes_the_lowest_of_equal_siblings(device):
    # Nodes 1 and 2 are the same token; only 2 has the child that the target wants next, yet 1 is taken.
    check_verify(device, [[0, 5, 5, 6]], [[-1, 0, 0, 2]], [[5, 6, 6, 0]])


def test_verify_never_matches_a_nan_row(device):
    # Padded nodes may hold token -1; a target of -1 must not accept them.
    check_verify(device, [[0, -1, -1]], [[-1, 0, 1]], [[-1, -1, -1]])


def test_verify_ends_whatever_the_parents_hold(device):
    rng = random.Random(3)
    parents = [[rng.randrange(-5, 70) for _ in range(33)] for _ in range(3)]
    parents += [
        [0] * 33,
        list(range(33)),
        [(j + 1) % 33 for j in range(33)],
        [2**31 - 1] * 33,
        [-(2**31)] * 33,
    ]
    check_verify(device, [[0] * 33] * len(parents), parents, [[0] * 33] * len(parents))


def test_verify_allocates_the_outputs_it_is_not_given(device):
    tokens = torch.tensor([[9, 1, 2]], dtype=torch.int32, device=device)
    parents = torch.tensor([[-1, 0, 1]], dtype=torch.int32, device=device)
    targets = torch.tensor([[1, 5, 6]], dtype=torch.int32, device=device)
    given = torch.full_like(tokens, 77)
    path, accept_len, predict = verify_tree(tokens, parents, targets, path=given)
    assert path is given
    assert (path.tolist(), accept_len.tolist(), predict.tolist()) == ([[0, 1, -1]], [2], [[1, 5, -1]])


def make_regions(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], layout: str
) -> tuple[torch.Tensor, list]:
    """(buffer, regions): K and V of two layers as views of one buffer of random bytes."""
    pages, heads, page_size, dim = shape
    size = torch.empty(0, dtype=dtype).element_size()
    if layout == "hnd":
        raw = torch.randint(0, 256, (2, pages, 2, heads, page_size, dim * size), dtype=torch.uint8)
        buffer = raw.to(device)
        return buffer, [buffer.view(dtype)[layer, :, kv] for layer in range(2) for kv in range(2)]
    raw = torch.randint(0, 256, (2, 2, pages, page_size, heads, dim * size), dtype=torch.uint8)
    buffer = raw.to(device)
    return buffer, [buffer.view(dtype)[layer, kv].transpose(1, 2) for layer in range(2) for kv in range(2)]


def check_compact(device, dtype, paths, *, shape=(9, 2, 4, 16), layout="hnd", max_depth=None, seed=0):
    """Moves the rows with both implementations and compares the whole buffer, byte for byte."""
    torch.manual_seed(seed)
    batch, num_nodes = len(paths), len(paths[0])
    slots = torch.randperm(shape[0] * shape[2])[: batch * num_nodes].reshape(batch, num_nodes)
    buffer, regions = make_regions(device, dtype, shape, layout)
    before = buffer.clone()
    expected = buffer.clone()
    byte_rows = [region.view(torch.uint8) for region in regions]
    pointers = [region.data_ptr() - buffer.data_ptr() for region in regions]
    for pointer, like in zip(pointers, byte_rows, strict=True):
        new = torch.as_strided(expected, like.shape, like.stride(), pointer)
        old = torch.as_strided(before, like.shape, like.stride(), pointer)
        for b, path in enumerate(paths):
            for d, node in enumerate(path[:max_depth]):
                if d >= 1 and node >= 0:
                    source, target = slots[b, node].item(), slots[b, d].item()
                    row = old[source // shape[2], :, source % shape[2]]
                    new[target // shape[2], :, target % shape[2]] = row
    path_tensor = torch.tensor(paths, dtype=torch.int32, device=device)
    for run in (compact_reference, compact_triton):
        buffer.copy_(before)
        # A region that is named twice must move once: a second move would start from moved rows.
        table = RowTable.build([[*regions, regions[0], regions[2]]])
        run(table, slots.int().to(device)[None], path_tensor, max_depth=max_depth or num_nodes)
        assert torch.equal(buffer, expected), f"wrong bytes from {run.__module__}"
    return not torch.equal(before, expected)


def increasing_path(rng: random.Random, num_nodes: int) -> list[int]:
    nodes = sorted(rng.sample(range(1, num_nodes), rng.randrange(num_nodes)))
    return [0, *nodes] + [-1] * (num_nodes - 1 - len(nodes))


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("dtype", [BF16, FP8, FP32])
def test_compact_window_rows_moves_every_buffer(device, dtype, layout):
    rng = random.Random(1)
    paths = [increasing_path(rng, 12) for _ in range(3)]
    assert check_compact(device, dtype, paths, layout=layout)


@pytest.mark.parametrize(
    ("path", "moves"),
    [
        ([0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, -1], True),
        ([0, 1, 7, 8, 11, -1, -1, -1, -1, -1, -1, -1], True),
        (list(range(12)), False),
        ([0] + [-1] * 11, False),
    ],
)
def test_compaction_reads_every_row_before_it_is_overwritten(device, path, moves):
    assert check_compact(device, BF16, [path, path]) == moves


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "word"), [(3, 5, FP8, 1), (1, 3, BF16, 2), (2, 6, BF16, 4), (5, 120, FP32, 8)]
)
def test_compaction_moves_words_of_every_size(device, heads, dim, dtype, word):
    rng = random.Random(word)
    shape = (7, heads, 4, dim)
    assert RowTable.build([make_regions(device, dtype, shape, "hnd")[1]]).word_bytes == word
    assert check_compact(device, dtype, [increasing_path(rng, 9), increasing_path(rng, 9)], shape=shape)


def test_compaction_looks_at_no_column_past_max_depth(device):
    path = [0, 2, 3, 5, 6, 7, 9, -1, -1, -1]
    assert check_compact(device, BF16, [path], max_depth=4)
    assert not check_compact(device, BF16, [path], max_depth=1)


def test_compaction_of_a_deep_path_moves_more_rows_than_one_block(device):
    path = list(range(0, 40, 2)) + [-1] * 20
    assert check_compact(device, FP8, [path], shape=(12, 1, 4, 16))


def test_hidden_rows_are_compacted_as_pages_of_one_row(device):
    hidden = torch.arange(2 * 4 * 6, dtype=FP32, device=device).reshape(8, 6)
    slots = torch.arange(8, dtype=torch.int32, device=device).reshape(2, 4)
    path = torch.tensor([[0, 2, 3, -1], [0, 3, -1, -1]], dtype=torch.int32, device=device)
    expected = hidden[[0, 2, 3, 3, 4, 7, 6, 7]]
    compact_window_rows(RowTable.build([[hidden[:, None, None, :]]]), slots[None], path)
    assert torch.equal(hidden, expected)


def test_regions_of_one_address_are_held_once(device):
    _, regions = make_regions(device, BF16, (3, 2, 4, 8), "hnd")
    (held,) = RowTable.build([[*regions, *regions]]).groups
    assert len(held) == 4
    with pytest.raises(AssertionError, match="shape"):
        RowTable.build([[regions[0], regions[1][:2]]])
