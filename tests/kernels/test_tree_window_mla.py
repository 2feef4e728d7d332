"""tree_window_attention over a latent cache (MLA): oracle, reference and tree_window_attention_mla_kernel agree.

The oracle walks one row at a time in float64 over all keys on its path, and never merges a partial.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.oracles.attention_paths import key_rows, pack_bits
from trtllm_tree.kernels.tree_window_attention import tree_window_attention
from trtllm_tree.kernels.tree_window_attention.mla import launch
from trtllm_tree.kernels.tree_window_attention.reference import reference

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
TOLERANCE = {BF16: 2e-2, FP16: 2e-3, FP32: 1e-5}
EMPTY, SHORT, LONG = [0, 0], [0, 3], [5, 70]


def tree(kind: str, num_nodes: int, seed: int = 0) -> list[list[int]]:
    """The columns that each node of a random tree, a chain or a star sees: its path up to the root."""
    rng = random.Random(seed)
    parents = {
        "random": [-1] + [max(rng.randrange(j), rng.randrange(j)) for j in range(1, num_nodes)],
        "chain": list(range(-1, num_nodes - 1)),
        "star": [-1] + [0] * (num_nodes - 1),
    }[kind]
    paths = []
    for node in range(num_nodes):
        path = []
        while node >= 0:
            path.append(node)
            node = parents[node]
        paths.append(path)
    return paths


def lanes(num_rows: int, window: int, seed: int = 0) -> list[list[int]]:
    """Rows that each see a few columns, but none the last; the last of several rows sees nothing."""
    rng = random.Random(seed)
    highest = max(window - 1, 1)
    rows = [rng.sample(range(highest), rng.randint(1, min(highest, 5))) for _ in range(num_rows)]
    return rows if num_rows == 1 else [*rows[:-1], []]


def attend_path(q: torch.Tensor, rows: torch.Tensor, value_dim: int, scale: float) -> tuple[Any, Any]:
    """(output [Hq, Dv], lse2 [Hq]) of one row's heads over latent rows [n, Dqk]; NaN for none."""
    if not len(rows):
        return math.nan, math.nan
    scores = q.double() @ rows.T * scale
    weights = torch.softmax(scores, dim=-1)
    return weights @ rows[:, :value_dim], torch.logsumexp(scores, dim=-1) / math.log(2)


@dataclass
class Call:
    """Arguments of one call of the op, and its true output."""

    args: list[Any]
    options: dict[str, Any]
    truth: torch.Tensor

    def check(self, run: Callable[..., None], **extra: Any) -> torch.Tensor:
        dtype = self.args[0].dtype
        # Rows of a wider tensor, so that the output's strides matter.
        wide = torch.full((*self.truth.shape[:-1], self.truth.shape[-1] + 3), math.nan, dtype=dtype)
        out = wide.to(self.truth.device)[..., : self.truth.shape[-1]]
        run(*self.args, **self.options, out=out, **extra)
        error = (out.double() - self.truth).abs().max().item()
        assert error <= TOLERANCE[dtype], f"off by {error}"
        return out

    def check_all(self, **extra: Any) -> None:
        self.check(reference)
        self.check(launch, **extra)


def make_call(
    device: str,
    prefix_lens: list[int],
    visible: list[list[list[int]]],
    window: int,
    *,
    causal: bool,
    num_heads: int = 3,
    dims: tuple[int, int] = (40, 8),
    page_size: int = 16,
    dtype: torch.dtype = FP32,
    cache_dtype: torch.dtype | None = None,
    partial_dtype: torch.dtype | None = None,
    missing_pages: int = 0,
) -> Call:
    """A random call; every slot that no row of its request sees holds NaN or infinity.

    The cache is a slice of a wider buffer that holds NaN beside it. The last `missing_pages` pages of each
    request are not allocated; then the dummy page is finite.
    """
    torch.manual_seed(sum(prefix_lens) + window)
    value_dim, query_dim, batch, num_rows = dims[0], sum(dims), len(prefix_lens), len(visible[0])
    max_pages = -(-(max(prefix_lens) + window) // page_size)
    wide_table = torch.zeros(batch, max_pages + 3, dtype=torch.int32)
    wide_table[:, :max_pages] = 1 + torch.randperm(batch * max_pages).reshape(batch, -1).int()
    page_table = wide_table[:, : max_pages - missing_pages]
    if missing_pages:
        page_table[0, -1] = -1

    num_pages = 1 + batch * max_pages
    seen = torch.zeros(num_pages, page_size, dtype=torch.bool)
    seen[0] = missing_pages > 0
    for b, prefix in enumerate(prefix_lens):
        for position in {*range(prefix), *(prefix + j for row in visible[b] for j in row)}:
            index = position // page_size
            page = max(int(page_table[b, index]), 0) if index < page_table.shape[1] else 0
            seen[page, position % page_size] = True
    # [num_pages, page_size, 1, channels], of which the latent rows are the channels from 16.
    buffer = torch.full((num_pages, page_size, 2, query_dim + 32), math.nan)
    rows = torch.randn(num_pages, page_size, query_dim)
    poison = torch.tensor([math.nan, math.inf])[torch.randint(2, rows.shape)]
    buffer[:, :, 0, 16 : 16 + query_dim] = torch.where(seen[:, :, None], rows, poison)
    cache = buffer.to(cache_dtype or dtype).to(device)[:, :, :1, 16 : 16 + query_dim].transpose(1, 2)
    assert cache.shape == (num_pages, 1, page_size, query_dim)
    assert not cache.is_contiguous()

    q = torch.randn(batch, num_heads, num_rows, query_dim).to(dtype).to(device).transpose(1, 2)
    scale = query_dim**-0.5
    truth = torch.zeros(batch, num_rows, num_heads, value_dim, dtype=torch.float64, device=device)
    partial, lse2 = torch.full_like(truth, math.nan), torch.full_like(truth[..., 0], math.nan)
    for b, prefix in enumerate(prefix_lens):
        keys = key_rows(cache, page_table[b].tolist(), list(range(prefix + window)), 0)
        for r, columns in enumerate(visible[b]):
            path = [*range(prefix), *(prefix + j for j in sorted(set(columns)))]
            if path:
                truth[b, r], _ = attend_path(q[b, r], keys[path], value_dim, scale)
            covered = prefix - num_rows + 1 + r if causal else prefix
            partial[b, r], lse2[b, r] = attend_path(q[b, r], keys[: max(covered, 0)], value_dim, scale)
    args = [
        q,
        cache,
        None,
        wide_table.to(device)[:, : max_pages - missing_pages],
        torch.tensor(prefix_lens, dtype=torch.int32, device=device),
        torch.stack([pack_bits(rows, window) for rows in visible]).to(device),
        partial.to(partial_dtype or dtype),
        lse2.float(),
    ]
    return Call(args, {"window": window, "causal_prefix": causal, "scale": scale}, truth)


def tree_call(device: str, num_nodes: int, prefix_lens: list[int], kind: str = "random", **kwargs) -> Call:
    """A verify window: R = W = N."""
    visible = [tree(kind, num_nodes, seed) for seed, _ in enumerate(prefix_lens)]
    return make_call(device, prefix_lens, visible, num_nodes, **kwargs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("prefix_lens", [EMPTY, SHORT, LONG])
@pytest.mark.parametrize(
    ("num_nodes", "page_size"), [(1, 16), (5, 32), (32, 64), (64, 16), (65, 32), (100, 64)]
)
def test_a_tree_window_equals_attention_over_every_path(device, num_nodes, page_size, prefix_lens, causal):
    call = tree_call(device, num_nodes, prefix_lens, causal=causal, page_size=page_size)
    call.check_all(tile=(64, 4) if num_nodes > 32 else None)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["chain", "star"])
@pytest.mark.parametrize("num_nodes", [17, 70])
def test_chains_and_stars_are_trees(device, num_nodes, kind, causal):
    tree_call(device, num_nodes, SHORT, kind, causal=causal).check_all(tile=(64, 4))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "window"), [(1, 1), (1, 100), (5, 12), (4, 33), (5, 64), (32, 7), (8, 65)]
)
def test_a_lane_window_equals_attention_over_all_visible_keys(device, num_rows, window, causal):
    visible = [lanes(num_rows, window, seed) for seed in range(3)]
    call = make_call(device, [0, 3, 40], visible, window, causal=causal)
    # Without a prefix, a lane that sees nothing gives 0.
    assert num_rows == 1 or not call.truth[0, -1].any()
    call.check_all()


@pytest.mark.parametrize(
    ("dims", "num_heads"), [((512, 64), 16), ((40, 8), 128), ((32, 0), 1), ((64, 3), 16)]
)
@pytest.mark.parametrize("tile", [(16, 4), (32, 8), (64, 8)])
def test_every_head_count_and_split_of_a_latent_row_is_right(device, dims, num_heads, tile):
    # 64 rows of 512 channels in float32 are more than a GPU's registers hold.
    dtype = BF16 if dims[0] == 512 else FP32
    call = tree_call(device, 5, [2, 21], causal=True, dims=dims, num_heads=num_heads, dtype=dtype)
    call.check_all(tile=tile)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "partial_dtype"),
    [(BF16, BF16, BF16), (BF16, BF16, FP32), (FP16, FP16, FP32), (BF16, FP8, BF16), (FP16, FP8, FP16)],
)
def test_low_precision_inputs_are_accumulated_in_float32(device, dtype, cache_dtype, partial_dtype, causal):
    dtypes = {"dtype": dtype, "cache_dtype": cache_dtype, "partial_dtype": partial_dtype}
    tree_call(device, 20, [3, 40], causal=causal, num_heads=4, dims=(128, 64), **dtypes).check_all()


def test_positions_without_a_page_are_read_from_the_dummy_page(device):
    tree_call(device, 20, [30, 31], causal=True, missing_pages=1).check_all()


def test_bits_beyond_the_window_are_ignored(device):
    for num_nodes in (12, 40):
        call = tree_call(device, num_nodes, [5], causal=True)
        call.args[5].bitwise_or_(-1 << num_nodes)
        call.check_all()


def test_two_runs_give_the_same_bits(device):
    call = tree_call(device, 40, LONG, causal=True, dtype=BF16)
    for run in (reference, launch):
        assert torch.equal(call.check(run), call.check(run))


def test_the_op_allocates_its_output_or_overwrites_the_partial(device):
    call = tree_call(device, 6, [7, 2], causal=True)
    given = tree_window_attention(*call.args, **call.options)
    torch.testing.assert_close(given.double(), call.truth, atol=1e-5, rtol=0)
    for run in (reference, launch):
        partial = call.args[6].clone()
        run(*call.args[:6], partial, call.args[7], **call.options, out=partial)
        torch.testing.assert_close(partial.double(), call.truth, atol=1e-5, rtol=0)


def test_the_op_runs_the_latent_kernel_where_kernels_run(device, monkeypatch):
    call = tree_call(device, 6, [7, 2], causal=False)
    expected = call.check(launch)
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    assert torch.equal(tree_window_attention(*call.args, **call.options), expected)


def test_a_latent_cache_of_two_heads_and_too_wide_a_value_are_refused(device):
    call = tree_call(device, 4, [2], causal=False)
    two_heads = [*call.args]
    two_heads[1] = call.args[1].expand(-1, 2, -1, -1)
    with pytest.raises(AssertionError, match="one head"):
        tree_window_attention(*two_heads, **call.options)
    wide = [*call.args]
    wide[6] = torch.zeros(1, 4, 3, 49, device=device)
    with pytest.raises(AssertionError, match="value channels"):
        tree_window_attention(*wide, **call.options)
