"""Benchmarks of `tree_window_attention` and `tree_decode` over a latent cache (MLA).

Latent rows lie in [num_pages, 1, page_size, Dv + rope] pools behind a page table in random order, one pool a buffer
set. Trees are random. Matrix work is counted over all keys, as a matrix unit computes it.

Legend: B requests, N query rows, P prefix keys, W = N window keys, Hq heads, Dv channels of a latent row that are its
value, rope channels behind them.
"""

from __future__ import annotations

import math

import torch

from trtllm_tree.bench.ops.entry import (
    Call,
    Case,
    Cost,
    OpBench,
    Workload,
    normal,
    page_table,
    random_parents,
)
from trtllm_tree.kernels.tree_ancestors import tree_ancestors
from trtllm_tree.kernels.tree_decode import tree_decode, workspace_shape
from trtllm_tree.kernels.tree_window_attention import tree_window_attention


def _cost(case: Case) -> Cost:
    folded_rows = case["B"] * case["N"] * case["Hq"]
    # A causal partial leaves the prefix's last N - 1 keys to this op.
    keys = case["N"] + (case["N"] - 1) * case["causal"]
    query_dim = case["Dv"] + case["rope"]
    # The query, the partial and the output in bfloat16, and lse2.
    rows = 2 * folded_rows * (query_dim + 2 * case["Dv"]) + 4 * folded_rows
    latent_rows = case["B"] * keys * query_dim * case.torch_dtype.itemsize
    mask = 8 * case["B"] * case["N"] * -(-case["N"] // 64)
    return Cost(rows + latent_rows + mask, 2 * folded_rows * keys * (query_dim + case["Dv"]))


def _build(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, nodes, prefix, page, device = case["B"], case["N"], case["P"], case["page"], generator.device
    query_dim = case["Dv"] + case["rope"]
    # Pages below the tail are never read: they are the dummy page 0.
    skipped = (prefix - nodes + 1) // page
    max_pages = -(-(prefix + nodes) // page) - skipped
    table = torch.nn.functional.pad(page_table(generator, batch, max_pages) + 1, (skipped, 0))
    prefix_lens = torch.full((batch,), prefix, dtype=torch.int32, device=device)
    mask = tree_ancestors(random_parents(generator, batch, nodes))[1]

    def call() -> Call:
        q = normal(generator, (batch, nodes, case["Hq"], query_dim), torch.bfloat16)
        pool = normal(generator, (batch * max_pages + 1, 1, page, query_dim), case.torch_dtype)
        partial = normal(generator, (batch, nodes, case["Hq"], case["Dv"]), torch.bfloat16)
        lse2 = torch.full(q.shape[:3], math.log2(prefix), device=device)
        out = torch.empty_like(partial)
        return lambda: tree_window_attention(
            q,
            pool,
            None,
            table,
            prefix_lens,
            mask,
            partial,
            lse2,
            window=nodes,
            causal_prefix=bool(case["causal"]),
            scale=1 / math.sqrt(query_dim),
            out=out,
        )

    return Workload([call() for _ in range(sets)])


def _case(batch: int, nodes: int, heads: int, causal: int) -> Case:
    # A prefix that ends inside a page.
    shape = {"B": batch, "N": nodes, "P": 1000, "causal": causal, "Hq": heads}
    return Case({**shape, "Dv": 512, "rope": 64, "page": 64}, "bfloat16")


def _decode_cost(case: Case) -> Cost:
    folded_rows, keys = case["B"] * case["N"] * case["Hq"], case["P"] + case["N"]
    query_dim = case["Dv"] + case["rope"]
    rows = 2 * folded_rows * (query_dim + case["Dv"])
    latent_rows = case["B"] * keys * query_dim * case.torch_dtype.itemsize
    mask = 8 * case["B"] * case["N"] * -(-case["N"] // 64)
    return Cost(rows + latent_rows + mask, 2 * folded_rows * keys * (query_dim + case["Dv"]))


def _decode(case: Case, sets: int, generator: torch.Generator) -> Workload:
    batch, nodes, prefix, page, device = case["B"], case["N"], case["P"], case["page"], generator.device
    query_dim, max_pages = case["Dv"] + case["rope"], -(-(prefix + nodes) // page)
    table = page_table(generator, batch, max_pages)
    prefix_lens = torch.full((batch,), prefix, dtype=torch.int32, device=device)
    mask = tree_ancestors(random_parents(generator, batch, nodes))[1]

    def call() -> Call:
        q = normal(generator, (batch, nodes, case["Hq"], query_dim), torch.bfloat16)
        pool = normal(generator, (batch * max_pages, 1, page, query_dim), case.torch_dtype)
        out = torch.empty((*q.shape[:3], case["Dv"]), dtype=q.dtype, device=device)
        shape = workspace_shape(q, pool, case["Dv"])
        workspace = torch.empty(shape, dtype=torch.float32, device=device)
        return lambda: tree_decode(
            q,
            pool,
            None,
            table,
            prefix_lens,
            mask,
            window=nodes,
            scale=1 / math.sqrt(query_dim),
            value_dim=case["Dv"],
            out=out,
            workspace=workspace,
        )

    return Workload([call() for _ in range(sets)])


def _decode_case(batch: int, nodes: int, heads: int, dtype: str = "bfloat16") -> Case:
    shape = {"B": batch, "P": 8192, "N": nodes, "Hq": heads}
    return Case({**shape, "Dv": 512, "rope": 64, "page": 64}, dtype)


MLA_OPS = (
    OpBench(
        "tree_window_attention_mla",
        ("tests/kernels/test_tree_window_mla.py",),
        tuple(
            _case(*size, causal)
            for size in ((32, 32, 128), (1, 32, 128), (32, 64, 128), (1, 64, 128), (32, 32, 16))
            for causal in (0, 1)
        ),
        _cost,
        _build,
        num_quick=2,
    ),
    OpBench(
        "tree_decode_mla",
        ("tests/kernels/test_tree_decode_mla.py",),
        (
            *(
                _decode_case(*size)
                for size in ((8, 32, 128), (1, 32, 128), (8, 1, 128), (8, 32, 16), (8, 64, 16))
            ),
            _decode_case(8, 32, 128, "float8_e4m3fn"),
        ),
        _decode_cost,
        _decode,
    ),
)
