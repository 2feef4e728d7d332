"""What single layers ask of the attention ops: a first key a row, and sinks. Each against a slow float64 oracle."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.kernels.test_tree_speculative import EDGE, MIXED, TOLERANCE, ancestors, make_window, random_parents
from tests.oracles import attention_paths as oracle
from trtllm_tree.kernels.prefix_attention import prefix_attention
from trtllm_tree.kernels.tree_window_attention import tree_window_attention
from trtllm_tree.kernels.tree_window_attention.reference import reference as window_reference
from trtllm_tree.kernels.tree_window_attention.triton import launch as window_triton

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "page_size", "heads"), [(1, 16, (2, 2)), (5, 16, (6, 2)), (8, 32, (4, 1))]
)
def test_rows_attend_from_their_first_key_on(device, num_rows, page_size, heads, causal, dtype):
    torch.manual_seed(num_rows)
    rng, kv_lens, scale = random.Random(num_rows), [0, 3, 16, 17, 40], 0.4
    batch, max_pages = len(kv_lens), -(-40 // page_size)
    table = 1 + torch.randperm(batch * max_pages).view(batch, max_pages).int()
    ends = [[n - num_rows + 1 + r if causal else n for r in range(num_rows)] for n in kv_lens]
    # Also behind the last key: that row then sees none.
    firsts = [[rng.randrange(max(end, 0) + 2) for end in row] for row in ends]
    chosen = [
        [[(0, slot) for slot in range(first, end)] for first, end in zip(*rows, strict=True)]
        for rows in zip(firsts, ends, strict=True)
    ]
    seen = torch.zeros(1 + table.numel(), page_size, dtype=torch.bool)
    for b, rows in enumerate(chosen):
        for _, slot in (key for keys in rows for key in keys):
            seen[table[b, slot // page_size], slot % page_size] = True
    pool = torch.randn(len(seen), 2, heads[1], page_size, 16)
    poison = torch.where(torch.rand(pool.shape) < 0.5, math.nan, math.inf)
    pool = torch.where(seen[:, None, None, :, None], pool, poison).to(device, dtype)
    args = (torch.randn(batch, num_rows, heads[0], 16).to(device, dtype), pool[:, 0], pool[:, 1])
    out, lse2 = prefix_attention(
        *args,
        table.to(device),
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        causal=causal,
        max_kv_len=50,
        scale=scale,
        first_keys=torch.tensor(firsts, dtype=torch.int32, device=device),
    )
    truth = oracle.chosen_attention(*args, table[:, None].tolist(), chosen, scale=scale)
    torch.testing.assert_close(out.double(), truth, atol=TOLERANCE[dtype], rtol=0)
    for b, rows in enumerate(chosen):
        for r, keys in enumerate(rows):
            assert lse2[b, r].isneginf().all() == (not keys)
            if keys:
                k = oracle.key_rows(args[1], table[b].tolist(), [slot for _, slot in keys], 0)
                total = torch.exp((k @ args[0][b, r, 0].double()) * scale).sum()
                assert lse2[b, r, 0].item() == pytest.approx(math.log2(total), abs=1e-4)


def sink_case(device, visible, prefix_lens, window, **options):
    """A window call with sinks: some far below the scores, some far above, in float64 as well."""
    case = make_window(device, prefix_lens, visible, window, **options)
    q, k_cache, v_cache, page_table, *_ = case.args
    sinks = torch.linspace(-4.0, 6.0, q.shape[2])
    tables = [[[max(page, 0) for page in row]] for row in page_table.tolist()]
    chosen = [
        [[(0, slot) for slot in [*range(prefix), *(prefix + j for j in sorted({*row}))]] for row in rows]
        for prefix, rows in zip(prefix_lens, visible, strict=True)
    ]
    case.truth = oracle.chosen_attention(
        q, k_cache, v_cache, tables, chosen, scale=case.options["scale"], sinks=sinks.tolist()
    )
    case.options["sinks"] = sinks.to(device)
    return case


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("prefix_lens", [MIXED, EDGE])
@pytest.mark.parametrize(("num_nodes", "block_m"), [(1, None), (9, None), (32, None), (64, 64), (65, 64)])
def test_sinks_take_their_share_of_every_row_once(device, num_nodes, block_m, prefix_lens, causal):
    rng = random.Random(num_nodes)
    visible = [ancestors(random_parents(rng, num_nodes)) for _ in prefix_lens]
    case = sink_case(device, visible, prefix_lens, num_nodes, causal=causal, heads=(6, 2))
    case.check(window_reference)
    case.check(window_triton, block_m=block_m)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "partial_dtype"), [(BF16, BF16, FP32), (FP16, FP16, FP16), (BF16, FP8, BF16)]
)
def test_sinks_in_low_precision(device, dtype, cache_dtype, partial_dtype):
    rng = random.Random(5)
    visible = [ancestors(random_parents(rng, 17)) for _ in EDGE]
    dtypes = {"dtype": dtype, "cache_dtype": cache_dtype, "partial_dtype": partial_dtype}
    case = sink_case(device, visible, EDGE, 17, causal=True, heads=(8, 2), head_dim=128, **dtypes)
    case.check(window_reference)
    case.check(window_triton)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_that_sees_nothing_but_its_sink_gives_0(device, causal):
    visible = [[[0, 3], [], [1]], [[2], [2], []]]
    case = sink_case(device, visible, [0, 20], 5, causal=causal)
    assert not case.truth[0, 1].any()
    case.check(window_reference)
    case.check(window_triton)


def test_a_partial_that_covers_nothing_by_its_lse_leaves_the_row_to_window_and_sink(device):
    """As a sliding layer hands it over: rows whose first key lies behind the prefix have lse -inf, and 0."""
    visible = [[[0], [0, 1], []]]
    case = sink_case(device, visible, [4], 3, causal=False)
    q, k_cache, v_cache, page_table, *_ = case.args
    case.args[6].zero_()
    case.args[7].fill_(-math.inf)
    chosen = [[[(0, 4 + j) for j in row] for row in visible[0]]]
    tables = [[row] for row in page_table.tolist()]
    options = {"scale": case.options["scale"], "sinks": case.options["sinks"].tolist()}
    case.truth = oracle.chosen_attention(q, k_cache, v_cache, tables, chosen, **options)
    case.check(window_reference)
    case.check(window_triton)
    case.options["sinks"] = None
    case.truth = oracle.chosen_attention(q, k_cache, v_cache, tables, chosen, scale=options["scale"])
    case.check(window_reference)
    case.check(window_triton)


def test_the_op_passes_sinks_on_and_checks_them(device):
    case = sink_case(device, [ancestors([-1, 0, 1, 1])], [7], 4, causal=False)
    out = tree_window_attention(*case.args, **case.options)
    torch.testing.assert_close(out.double(), case.truth, atol=1e-5, rtol=0)
    for sinks, message in ((torch.zeros(3), "must be"), (torch.zeros(2, dtype=BF16), "float32")):
        with pytest.raises(AssertionError, match=message):
            tree_window_attention(*case.args, **case.options | {"sinks": sinks.to(device)})
    latent = (case.args[0], case.args[1], None, *case.args[3:])
    with pytest.raises(AssertionError, match="latent"):
        tree_window_attention(*latent, **case.options)
