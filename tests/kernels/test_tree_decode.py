"""One-pass tree attention: oracle, torch reference and Triton kernel agree (interpreted without a GPU)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.oracles import attention_paths as oracle
from tests.oracles import trees
from trtllm_tree.kernels.tree_decode import tree_decode, workspace_shape
from trtllm_tree.kernels.tree_decode.reference import reference
from trtllm_tree.kernels.tree_decode.tiles import Tile, choose_splits
from trtllm_tree.kernels.tree_decode.triton import launch

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
TOLERANCE = {BF16: 2e-2, FP16: 2e-3, FP32: 1e-5}
WIDE = Tile(128, 128, 8, 2, 1)


@dataclass
class Case:
    """Inputs of one call, and its true output."""

    args: tuple[torch.Tensor, ...]
    options: dict[str, Any]
    truth: torch.Tensor

    def run(self, run: Callable[..., None], **extra: Any) -> torch.Tensor:
        """The output, written over garbage in rows that are slices of wider ones."""
        q = self.args[0]
        out = q.new_full((*q.shape[:2], q.shape[2] + 1, q.shape[3]), math.nan)[:, :, 1:]
        if run is launch:
            num_splits = extra.get("num_splits") or 1000  # more than a GPU takes
            numel = num_splits * math.prod(q.shape[:3]) * (q.shape[3] + 4)
            extra["workspace"] = torch.full((numel,), math.nan, device=q.device)
        run(*self.args, **self.options, out=out, **extra)
        return out

    def check(self, run: Callable[..., None], **extra: Any) -> None:
        out = self.run(run, **extra)
        error = (out.double() - self.truth).abs().max().item()
        assert error <= TOLERANCE[out.dtype], f"off by {error} with {extra}"

    def check_all(self, splits: tuple[int, ...] = (1, 3), **extra: Any) -> None:
        self.check(reference)
        for num_splits in splits:
            self.check(launch, num_splits=num_splits, **extra)


def make_case(
    device: str,
    prefix_lens: list[int],
    visible: list[list[list[int]]],
    window: int,
    *,
    page_size: int = 16,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    dtype: torch.dtype = FP32,
    cache_dtype: torch.dtype | None = None,
    fp8_query: bool = False,
    missing_pages: int = 0,
) -> Case:
    """Random call; every slot that no row of its request sees holds NaN or infinity, in K and in V.

    The last `missing_pages` pages of each request are not allocated; then the dummy page is finite.
    """
    torch.manual_seed(sum(prefix_lens) + window + head_dim)
    batch, num_rows = len(prefix_lens), len(visible[0])
    max_pages = -(-(max(prefix_lens) + window) // page_size)
    num_pages = 1 + batch * max_pages
    # A wider table whose rows are cut: its rows are not contiguous.
    wide = torch.full((batch, max_pages + 3), num_pages - 1, dtype=torch.int32)
    wide[:, :max_pages] = 1 + torch.randperm(batch * max_pages).reshape(batch, max_pages).int()
    page_table = wide[:, : max_pages - missing_pages]
    if missing_pages:
        page_table[0, -1] = -1
    seen = torch.zeros(num_pages, page_size, dtype=torch.bool)
    seen[0] = missing_pages > 0
    for b, prefix in enumerate(prefix_lens):
        for position in {*range(prefix), *(prefix + j for row in visible[b] for j in row)}:
            index = position // page_size
            page = max(int(page_table[b, index]), 0) if index < page_table.shape[1] else 0
            seen[page, position % page_size] = True

    # K and V share a pool, so neither is contiguous.
    pool = torch.randn(num_pages, 2, heads[1], page_size, head_dim)
    poison = torch.tensor([math.nan, math.inf])[torch.randint(2, pool.shape)]
    pool = torch.where(seen[:, None, None, :, None], pool, poison).to(cache_dtype or dtype).to(device)
    k_cache, v_cache = pool[:, 0], pool[:, 1]
    q = torch.randn(batch, num_rows, heads[0] + 1, head_dim, device=device).to(dtype)[:, :, 1:]
    mask = torch.stack([oracle.pack_bits(rows, window) for rows in visible]).to(device)
    page_table = wide.to(device)[:, : max_pages - missing_pages]
    lens = torch.tensor(prefix_lens, dtype=torch.int32, device=device)
    scale = head_dim**-0.5
    rounded = q.to(FP8).double() if fp8_query else q
    truth = oracle.window_attention(rounded, k_cache, v_cache, page_table, prefix_lens, visible, scale=scale)
    options = {"window": window, "scale": scale, "fp8_query": fp8_query}
    return Case((q, k_cache, v_cache, page_table, lens, mask), options, truth)


def tree_case(device: str, num_nodes: int, prefix_lens: list[int], **kwargs: Any) -> Case:
    """A verify window: R = W = N, every row sees its ancestors. One tree is a star, one a chain."""
    rng = random.Random(num_nodes)
    shapes = [trees.random_tree(rng, num_nodes) for _ in prefix_lens]
    shapes[0], shapes[-1] = trees.star(num_nodes), trees.chain(num_nodes)
    visible = [[trees.path_to(parents, node) for node in range(num_nodes)] for parents in shapes]
    return make_case(device, prefix_lens, visible, num_nodes, **kwargs)


@pytest.mark.parametrize("num_nodes", [1, 4, 8, 17, 32, 64, 65])
def test_every_row_sees_its_prefix_and_its_ancestors(device, num_nodes):
    for page_size in (16, 32, 64):
        prefix_lens = [0, num_nodes - 1, num_nodes, page_size, 2 * page_size - 1, 131]
        case = tree_case(device, num_nodes, prefix_lens, page_size=page_size)
        # Wide tiles keep the interpreter's program count low.
        tile = None if num_nodes <= 8 else Tile(64 if device == "cpu" else 16, 32, 8, 1, 1)
        case.check_all(tile=tile)


@pytest.mark.parametrize(
    ("page_size", "tile", "use_tma"),
    [
        (16, Tile(64, 64, 4, 2, 2), False),
        (32, Tile(64, 64, 4, 2, 2), True),
        (64, Tile(64, 64, 4, 2, 2), True),
        (64, Tile(16, 64, 4, 3, 2), True),
        (64, Tile(64, 128, 4, 2, 1), True),
        (64, WIDE, True),
        (64, WIDE, False),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_keys_arrive_whole_by_tma_or_by_pointers(device, page_size, tile, use_tma, dtype):
    # Prefixes that end before, at and behind the edges of pages and of key blocks.
    prefix_lens = [1, 63, 64, 65, 128, 300]
    case = tree_case(device, 9, prefix_lens, page_size=page_size, heads=(8, 2), head_dim=128, dtype=dtype)
    case.check_all(tile=tile, use_tma=use_tma)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (3, 64), (5, 80), (7, 96), (8, 64), (16, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_head_ratio_and_head_size_is_right(device, group, head_dim, dtype):
    case = tree_case(device, 9, [70], heads=(2 * group, 2), head_dim=head_dim, dtype=dtype, page_size=64)
    case.check(reference)
    case.check(launch)


@pytest.mark.parametrize(
    ("topk", "window"), [(2, 12), (8, 32), (16, 64), (5, 65), (3, 128), (4, 200), (2, 256)]
)
def test_lanes_see_any_columns_of_one_two_or_four_mask_words(device, topk, window):
    rng = random.Random(topk)
    prefix_lens = [0, 3, 40, 130]
    # No lane sees the column before the last, and one lane of the first request sees nothing.
    visible = [[[*rng.sample(range(window - 2), 4), window - 1] for _ in range(topk)] for _ in prefix_lens]
    visible[0][topk - 1] = []
    case = make_case(device, prefix_lens, visible, window, heads=(4, 2))
    assert not case.truth[0, topk - 1].any()
    case.check_all()
    low = make_case(device, prefix_lens, visible, window, heads=(4, 2), dtype=BF16, page_size=64)
    low.check_all(tile=Tile(64, 64, 4, 2, 2))


@pytest.mark.parametrize(("dtype", "limit"), [(BF16, 4e-3), (FP16, 5e-4)])
@pytest.mark.parametrize("fp8_query", [False, True])
@pytest.mark.parametrize("tile", [None, WIDE])
def test_an_fp8_cache_is_widened_exactly_and_an_fp8_query_is_rounded_once(
    device, dtype, limit, fp8_query, tile
):
    shape = {"heads": (8, 2), "head_dim": 128, "page_size": 64}
    case = tree_case(device, 17, [3, 200, 128], dtype=dtype, cache_dtype=FP8, fp8_query=fp8_query, **shape)
    for run, extra in ((reference, {}), (launch, {"num_splits": 2, "tile": tile})):
        error = (case.run(run, **extra).double() - case.truth).norm() / case.truth.norm()
        assert error <= limit, f"{run.__module__}: {error}"
    if fp8_query:
        exact = tree_case(device, 17, [3, 200, 128], dtype=dtype, cache_dtype=FP8, **shape)
        error = (case.truth - exact.truth).norm() / exact.truth.norm()
        assert 5e-3 < error < 5e-2, f"rounding q to FP8 costs {error}"


def test_an_fp8_query_saturates(device):
    case = tree_case(device, 3, [9], dtype=BF16, cache_dtype=FP8, fp8_query=True, page_size=64)
    large = replace(case, args=(case.args[0] * 1e4, *case.args[1:]))
    clamped = replace(case, args=(large.args[0].clamp(-448, 448), *case.args[1:]))
    for run in (reference, launch):
        assert torch.equal(large.run(run), clamped.run(run))


def test_positions_without_a_page_are_read_from_the_dummy_page(device):
    tree_case(device, 20, [30, 31], missing_pages=1).check_all()
    long = tree_case(device, 5, [190, 191], missing_pages=2, page_size=64, dtype=BF16)
    long.check_all(tile=Tile(16, 64, 4, 2, 1))


def test_bits_beyond_the_window_are_ignored(device):
    case = tree_case(device, 12, [5])
    case.args[5].bitwise_or_(-1 << 12)
    case.check_all()


def test_a_siblings_key_changes_nothing(device):
    # Nodes 1 and 2 are siblings: row 2 must not move when node 1's key and value do.
    case = make_case(device, [40], [[[0], [0, 1], [0, 2], [0, 2, 3]]], 4)
    before = case.run(launch)
    _, k_cache, v_cache, page_table, _, _ = case.args
    page, offset = int(page_table[0, 41 // 16]), 41 % 16
    k_cache[page, :, offset] += 1.0
    v_cache[page, :, offset] -= 2.0
    after = case.run(launch)
    assert torch.equal(after[0, [0, 2, 3]], before[0, [0, 2, 3]])
    assert not torch.equal(after[0, 1], before[0, 1])


@pytest.mark.parametrize("num_splits", [1, 5, 35])
def test_two_calls_agree_bit_for_bit(device, num_splits):
    case = tree_case(device, 9, [300, 17], heads=(4, 1), head_dim=128, dtype=BF16, page_size=64)
    first, second = (case.run(launch, num_splits=num_splits) for _ in range(2))
    assert torch.equal(first, second)
    case.check(launch, num_splits=num_splits)


def test_the_op_allocates_what_it_is_not_given(device, monkeypatch):
    case = tree_case(device, 6, [70, 2])
    for choice in ("reference", "triton"):
        monkeypatch.setenv("TLLM_TREE_KERNELS", choice)
        out = tree_decode(*case.args, **case.options)
        torch.testing.assert_close(out.double(), case.truth, atol=1e-5, rtol=0)
        workspace = torch.empty(workspace_shape(*case.args[:2]), device=device)
        again = torch.full_like(out, math.nan)
        assert tree_decode(*case.args, **case.options, out=again, workspace=workspace) is again
        assert torch.equal(out, again)
    with pytest.raises(AssertionError, match="mask must be"):
        tree_decode(*case.args, **case.options | {"window": 65})
    with pytest.raises(AssertionError, match="fp8_query"):
        tree_decode(*case.args, **case.options | {"fp8_query": True})


@pytest.mark.parametrize("num_programs", [1, 3, 8, 10, 64, 80, 132, 140, 256, 1000])
def test_splits_fill_whole_waves(num_programs):
    slots = 132
    num_ctas = num_programs * choose_splits(num_programs, slots)
    used = num_ctas / (-(-num_ctas // slots) * slots)
    assert used >= 0.7
    assert num_ctas <= max(3 * slots, num_programs)


def random_call(
    batch: int,
    num_rows: int,
    prefix: int,
    *,
    heads: tuple[int, int] = (32, 8),
    cache_dtype: torch.dtype = BF16,
) -> Case:
    """A large call on the GPU with lengths around `prefix`; the truth is the reference in float32."""
    torch.manual_seed(batch + num_rows)
    page_size, head_dim, device = 64, 128, "cuda"
    max_pages = -(-(prefix + num_rows) // page_size)
    pool = torch.randn(1 + batch * max_pages, 2, heads[1], page_size, head_dim, device=device).to(cache_dtype)
    table = 1 + torch.randperm(batch * max_pages, device=device).view(batch, max_pages).int()
    lens = (prefix - torch.randint(prefix // 4, (batch,), device=device)).int()
    q = torch.randn(batch, num_rows, heads[0], head_dim, device=device, dtype=BF16)
    rng = random.Random(num_rows)
    visible = [trees.path_to(trees.random_tree(rng, num_rows), node) for node in range(num_rows)]
    mask = oracle.pack_bits(visible, num_rows).to(device).repeat(batch, 1, 1)
    args = (q, pool[:, 0], pool[:, 1], table, lens, mask)
    options = {"window": num_rows, "scale": head_dim**-0.5, "fp8_query": False}
    truth = torch.empty(q.shape, device=device)
    reference(*args, **options, out=truth)
    return Case(args, options, truth.double())


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [BF16, FP8])
@pytest.mark.parametrize(
    ("batch", "num_rows", "prefix"),
    [(1, 1, 8192), (1, 16, 8192), (3, 8, 8192), (8, 32, 8000), (2, 64, 8192), (32, 17, 2048), (64, 65, 700)],
)
def test_long_prefixes_and_large_batches_on_a_gpu(batch, num_rows, prefix, cache_dtype):
    case = random_call(batch, num_rows, prefix, cache_dtype=cache_dtype)
    out = tree_decode(*case.args, **case.options)
    error = (out.double() - case.truth).norm() / case.truth.norm()
    assert error <= 5e-3, f"relative error {error}"
    assert torch.equal(out, tree_decode(*case.args, **case.options))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_nodes", "heads", "head_dim"),
    [(17, (16, 2), 128), (33, (8, 2), 64), (65, (2, 1), 80), (40, (7, 1), 96)],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_specialised_kernel_is_right_on_a_gpu(num_nodes, heads, head_dim, dtype):
    # Prefixes with no whole key block, with exactly some, and with every kind of rest.
    prefix_lens = [0, 1, 63, 64, 127, 128, 200, 700]
    shape = {"page_size": 64, "heads": heads, "head_dim": head_dim, "dtype": dtype}
    case = tree_case("cuda", num_nodes, prefix_lens, **shape)
    for num_splits in (1, 2, 5):
        case.check(launch, tile=WIDE, num_splits=num_splits, specialise=True)
    short = tree_case("cuda", num_nodes, [190, 191], missing_pages=1, **shape)
    short.check(launch, tile=WIDE, num_splits=2, specialise=True)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_query", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_specialised_kernel_widens_fp8_on_a_gpu(fp8_query, head_dim):
    dtypes = {"dtype": BF16, "cache_dtype": FP8, "fp8_query": fp8_query}
    case = tree_case(
        "cuda", 33, [0, 1, 127, 128, 400, 900], page_size=64, heads=(8, 2), head_dim=head_dim, **dtypes
    )
    for num_splits in (1, 2, 5):
        out = case.run(launch, tile=WIDE, num_splits=num_splits, specialise=True)
        error = (out.double() - case.truth).norm() / case.truth.norm()
        assert error <= 3e-3, f"relative error {error}"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [64, 65, 200, 256])
def test_the_specialised_kernel_reads_every_mask_word_on_a_gpu(window):
    rng = random.Random(window)
    prefix_lens = [0, 30, 100, 128, 333]
    visible = [[rng.sample(range(window - 1), 9) for _ in range(32)] for _ in prefix_lens]
    visible[0][5] = []
    shape = {"page_size": 64, "heads": (8, 2), "head_dim": 128, "dtype": BF16}
    case = make_case("cuda", prefix_lens, visible, window, **shape)
    for num_splits in (1, 3):
        case.check(launch, tile=WIDE, num_splits=num_splits, specialise=True)


@pytest.mark.gpu
def test_a_captured_call_follows_the_lengths_of_each_replay():
    case = random_call(2, 16, 4096)
    lens = case.args[4]
    out = torch.empty_like(case.args[0])
    workspace = torch.empty(workspace_shape(*case.args[:2]), device="cuda")
    tree_decode(*case.args, **case.options, out=out, workspace=workspace)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    tree_decode(*case.args, **case.options, out=out, workspace=workspace)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_decode(*case.args, **case.options, out=out, workspace=workspace)
    for prefix_lens in ([4000, 7], [0, 1311]):
        lens.copy_(torch.tensor(prefix_lens))
        graph.replay()
        truth = torch.empty(out.shape, device="cuda")
        reference(*case.args, **case.options, out=truth)
        torch.testing.assert_close(out.float(), truth, atol=2e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("use_tma", [True, False])
def test_offsets_beyond_32_bits_are_right(use_tma):
    case = random_call(1, 16, 300)
    q, k_cache, v_cache, table, lens, mask = case.args
    pages, stride = k_cache.shape[0], 2**31 // 4 + 64
    buffer = torch.empty(pages * stride, dtype=BF16, device="cuda")
    shape, strides = k_cache.shape, (stride, *k_cache.stride()[1:])
    far_k = buffer.as_strided(shape, strides).copy_(k_cache)
    far_v = buffer.as_strided(shape, strides, 2**28).copy_(v_cache)
    assert pages * stride > 2**31
    far = replace(case, args=(q, far_k, far_v, table, lens, mask))
    far.check(launch, use_tma=use_tma)
