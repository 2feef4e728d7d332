"""Benchmarks of the two tree attention ops, and the inputs that their baselines share.

Keys lie in [num_pages, Hkv, page_size, D] pools behind a page table in random order, one pool a buffer set. Trees
are random. Matrix work is counted over the prefix and the whole window, as a matrix unit computes it.

Legend: B requests, N query rows, P prefix keys, W = N window keys, Hq/Hkv heads, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trtllm_tree.bench.ops.entry import (
    Baseline,
    Call,
    Case,
    Cost,
    OpBench,
    Workload,
    normal,
    page_table,
    random_parents,
)
from trtllm_tree.bench.ops.flashinfer_calls import BASELINES
from trtllm_tree.kernels.tree_ancestors import tree_ancestors
from trtllm_tree.kernels.tree_decode import tree_decode, workspace_shape
from trtllm_tree.kernels.tree_window_attention import tree_window_attention

_HEADS = {"Hq": 32, "Hkv": 8, "D": 128, "page": 64}


@dataclass(frozen=True)
class AttentionInputs:
    """What one case of tree attention reads.

    Attributes:
        q: one [B, N, Hq, D] bfloat16 a set.
        pools: one (K, V) pair [num_pages, Hkv, page_size, D] a set.
        table: page table int32 [B, max_pages], of every set.
        prefix_lens: int32 [B], all P.
        mask: ancestor mask int64 [B, N, words].
    """

    case: Case
    q: list[torch.Tensor]
    pools: list[tuple[torch.Tensor, torch.Tensor]]
    table: torch.Tensor
    prefix_lens: torch.Tensor
    mask: torch.Tensor

    @property
    def scale(self) -> float:
        """Factor of q . k."""
        return 1 / math.sqrt(self.case["D"])

    @classmethod
    def draw(
        cls, case: Case, sets: int, generator: torch.Generator, *, first_key: int = 0
    ) -> AttentionInputs:
        """Random inputs; pages that hold only keys below `first_key` are the dummy page 0."""
        batch, nodes, prefix, page = (case[name] for name in ("B", "N", "P", "page"))
        skipped = first_key // page
        max_pages = -(-(prefix + nodes) // page) - skipped
        table = torch.nn.functional.pad(page_table(generator, batch, max_pages) + 1, (skipped, 0))
        pool = (batch * max_pages + 1, case["Hkv"], page, case["D"])
        queries = (batch, nodes, case["Hq"], case["D"])
        parents = random_parents(generator, batch, nodes)
        return cls(
            case=case,
            q=[normal(generator, queries, torch.bfloat16) for _ in range(sets)],
            pools=[
                (normal(generator, pool, case.torch_dtype), normal(generator, pool, case.torch_dtype))
                for _ in range(sets)
            ],
            table=table,
            prefix_lens=torch.full((batch,), prefix, dtype=torch.int32, device=generator.device),
            mask=tree_ancestors(parents)[1],
        )


def _rows_bytes(case: Case) -> int:
    """A [B, N, Hq, D] bfloat16 tensor."""
    return 2 * case["B"] * case["N"] * case["Hq"] * case["D"]


def _keys_bytes(case: Case, num_keys: int) -> int:
    return 2 * case["B"] * num_keys * case["Hkv"] * case["D"] * case.torch_dtype.itemsize


def _mask_bytes(case: Case) -> int:
    return 8 * case["B"] * case["N"] * -(-case["N"] // 64)


def _attention_flops(case: Case, num_keys: int) -> int:
    return 4 * case["B"] * case["N"] * case["Hq"] * case["D"] * num_keys


def _window_keys(case: Case) -> int:
    """A causal partial leaves the prefix's last N - 1 keys to this op."""
    return case["N"] + (case["N"] - 1) * case["causal"]


def _window_cost(case: Case) -> Cost:
    keys = _window_keys(case)
    partial = _rows_bytes(case) + 4 * case["B"] * case["N"] * case["Hq"]
    moved = 2 * _rows_bytes(case) + partial + _keys_bytes(case, keys) + _mask_bytes(case)
    return Cost(moved, _attention_flops(case, keys))


def _window(case: Case, sets: int, generator: torch.Generator) -> Workload:
    inputs = AttentionInputs.draw(case, sets, generator, first_key=case["P"] - case["N"] + 1)
    queries = inputs.q[:1] * sets if case["hot"] else inputs.q
    lse2 = torch.full(queries[0].shape[:3], math.log2(case["P"]), device=generator.device)

    def partial_of(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return normal(generator, tuple(q.shape), q.dtype), lse2.clone(), torch.empty_like(q)

    shared = partial_of(queries[0])

    def call_on(q: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor]) -> Call:
        partial, partial_lse2, out = shared if case["hot"] else partial_of(q)
        return lambda: tree_window_attention(
            q,
            *pool,
            inputs.table,
            inputs.prefix_lens,
            inputs.mask,
            partial,
            partial_lse2,
            window=case["N"],
            causal_prefix=bool(case["causal"]),
            scale=inputs.scale,
            out=out,
        )

    return Workload([call_on(q, pool) for q, pool in zip(queries, inputs.pools, strict=True)])


def _decode_cost(case: Case) -> Cost:
    keys = case["P"] + case["N"]
    moved = 2 * _rows_bytes(case) + _keys_bytes(case, keys) + _mask_bytes(case)
    return Cost(moved, _attention_flops(case, keys))


def _decode_calls(inputs: AttentionInputs, num_rows: int) -> list[Call]:
    """`tree_decode` over the first `num_rows` nodes of the window."""
    fp8_query = bool(inputs.case["fp8_query"])
    mask = inputs.mask[:, :num_rows, : -(-num_rows // 64)].contiguous()

    def call_on(q: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor]) -> Call:
        rows = q[:, :num_rows].contiguous()
        out = torch.empty_like(rows)
        shape = workspace_shape(rows, pool[0])
        workspace = torch.empty(shape, dtype=torch.float32, device=q.device)
        return lambda: tree_decode(
            rows,
            *pool,
            inputs.table,
            inputs.prefix_lens,
            mask,
            window=num_rows,
            scale=inputs.scale,
            fp8_query=fp8_query,
            out=out,
            workspace=workspace,
        )

    return [call_on(q, pool) for q, pool in zip(inputs.q, inputs.pools, strict=True)]


def _decode(case: Case, sets: int, generator: torch.Generator) -> Workload:
    inputs = AttentionInputs.draw(case, sets, generator)
    tolerance = 0.1 if case.torch_dtype.itemsize == 1 else 0.03
    baselines = {
        name: Baseline(lambda build=build: build(inputs), tolerance if is_same else None)
        for name, (build, is_same) in BASELINES.items()
    }
    baselines["q_len=1 tree_decode"] = Baseline(lambda: _decode_calls(inputs, 1))
    return Workload(_decode_calls(inputs, case["N"]), baselines)


def _window_case(batch: int, nodes: int, causal: int, hot: int = 1) -> Case:
    """`hot`: queries, partial and output are the same in every call, only the keys are cold.

    So it is in the cascade, where the kernel before this one has just written them.
    """
    # A prefix that ends inside a page.
    return Case({"B": batch, "N": nodes, "P": 1000, "causal": causal, "hot": hot, **_HEADS}, "bfloat16")


def _decode_case(batch: int, prefix: int, nodes: int, fp8_query: int | None = None) -> Case:
    """A bfloat16 cache, or with `fp8_query` given a float8 cache."""
    dtype = "bfloat16" if fp8_query is None else "float8_e4m3fn"
    return Case({"B": batch, "P": prefix, "N": nodes, "fp8_query": fp8_query or 0, **_HEADS}, dtype)


_WINDOW_SIZES = ((32, 32), (1, 32), (1, 16), (1, 64), (8, 32), (32, 16), (32, 64))
_DECODE_SIZES = ((8, 32768), (32, 8192), (32, 32768), (8, 8192), (1, 8192))
_ROWS = (32, 16, 8, 64)
ATTENTION_OPS = (
    OpBench(
        "tree_window_attention",
        ("tests/kernels/test_tree_speculative.py",),
        (
            *(_window_case(*size, causal) for size in _WINDOW_SIZES for causal in (0, 1)),
            *(_window_case(32, 32, causal, hot=0) for causal in (0, 1)),
        ),
        _window_cost,
        _window,
        num_quick=2,
    ),
    OpBench(
        "tree_decode",
        ("tests/kernels/test_tree_decode.py",),
        (
            *(_decode_case(*size, nodes) for size in _DECODE_SIZES for nodes in _ROWS),
            *(
                _decode_case(*size, nodes, fp8_query)
                for size in _DECODE_SIZES[:2]
                for fp8_query in (1, 0)
                for nodes in _ROWS
            ),
        ),
        _decode_cost,
        _decode,
    ),
)
