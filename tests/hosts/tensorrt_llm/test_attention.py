"""`TreeCascadeFmha` against plain attention in float64, row by row, over pools of NaN where nothing was written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.hosts.tensorrt_llm.attention_runs import (
    BLOCKS,
    FP8,
    LAYER,
    PARENTS,
    PREFIX,
    Args,
    Layer,
    metadata,
    verify_step,
)
from tests.hosts.tensorrt_llm.pools import row_of
from trtllm_tree.attention.cascade import TreeCascadeRows
from trtllm_tree.hosts.tensorrt_llm import leaf
from trtllm_tree.hosts.tensorrt_llm.step import TreeStep, publish
from trtllm_tree.support.leaf_rules import LEAF_RULES


@pytest.fixture(autouse=True)
def fresh_leaves() -> Iterator[None]:
    """The choice of a leaf outlives a test that changes what can be chosen."""
    leaf.choose_leaf.cache_clear()
    yield
    leaf.choose_leaf.cache_clear()


def check_verify(layer: Layer, *, tolerance: float, behind: int = -1, split: bool = False) -> None:
    layer.fill_prefix(PREFIX)
    step, seen = verify_step(layer, behind=behind)
    qkv, nodes = layer.qkv(3 * len(PARENTS[0])), len(PARENTS[0])
    wanted = layer.expected(qkv, step, seen, [list(range(nodes))] * 3)
    data = metadata()
    publish(data, step)
    before = qkv.clone()
    out = layer.run(qkv, data, split=split)
    assert torch.equal(qkv, before), "the projection's rows are not ours to change"
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=tolerance, atol=tolerance)
    # Every window row lies where its node's index says, turned by its depth, and in this layer alone.
    fused = qkv.view(3, nodes, -1, layer.dim)
    for b in range(3):
        for node in range(nodes):
            k = fused[b, node, layer.heads : layer.heads + layer.kv_heads]
            k = layer.as_cached(layer.turned(k, int(step.positions[b, node])))
            stored = row_of(layer.manager, LAYER, BLOCKS[b], PREFIX[b] + node, 0)
            torch.testing.assert_close(
                stored.cpu().double(), k, rtol=max(tolerance, 0.13 * (layer.kv_dtype == FP8)), atol=1e-2
            )
    for other in (0, 2):
        for block in range(10):
            for kind in range(2):
                assert layer.manager.rows(other, block, kind).float().isnan().all(), (
                    "another layer's rows changed"
                )


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize(
    "rope_dim, style",
    [(8, "rope_gpt_neox"), (8, "rope_gptj"), (4, "rope_gpt_neox"), (4, "rope_gptj"), (8, "yarn"), (0, "")],
)
def test_verify_rows_attend_their_ancestors_whatever_the_layer_rotates(generation, rope_dim, style):
    check_verify(Layer(generation=generation, rope_dim=rope_dim, style=style), tolerance=1e-4)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (5, 1)])
def test_verify_rows_of_any_head_ratio(heads, kv_heads):
    check_verify(Layer(heads=heads, kv_heads=kv_heads), tolerance=1e-4)


@pytest.mark.parametrize("generation", [1, 2])
def test_an_fp8_cache_holds_and_gives_unscaled_rows(generation):
    check_verify(Layer(generation=generation, dtype=torch.bfloat16, kv_dtype=FP8), tolerance=4e-2)


@pytest.mark.parametrize("behind", [-1, 7, 9999])
def test_what_lies_behind_a_requests_pages_is_never_read(behind):
    check_verify(Layer(), tolerance=1e-4, behind=behind)


def test_queries_keys_and_values_may_come_apart():
    check_verify(Layer(), tolerance=1e-4, split=True)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreted; on a GPU the captured steps below run the kernel"
)
def test_our_kernel_attends_the_same_rows(monkeypatch):
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    # The leaf is offered larger pages only; the kernel has no such limit.
    monkeypatch.setitem(LEAF_RULES, "triton", replace(LEAF_RULES["triton"], page_sizes=()))
    layer = Layer(dim=64, rope_dim=64, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    check_verify(layer, tolerance=3e-2)
    assert [cascade.leaf.name for cascade in layer.fmha._cascades.values()] == ["triton"]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype, tolerance", [(torch.bfloat16, 3e-2), (FP8, 6e-2)])
@pytest.mark.parametrize("generation", [1, 2])
def test_a_captured_step_attends_the_trees_of_its_replay(generation, kv_dtype, tolerance):
    layer = Layer(
        generation=generation, dim=64, rope_dim=64, dtype=torch.bfloat16, kv_dtype=kv_dtype, device="cuda", page=16
    )  # fmt: skip
    layer.fill_prefix(PREFIX)
    step, seen = verify_step(layer)
    qkv, data, nodes = layer.qkv(18), metadata(), len(PARENTS[0])
    publish(data, step)
    output = torch.empty(18, layer.heads * layer.dim, dtype=torch.bfloat16, device="cuda")
    # Captured over chains, as before any tree exists.
    mask, positions = step.rows.mask.clone(), step.positions.clone()
    step.rows.mask.copy_((2 << torch.arange(nodes, device="cuda")).unsqueeze(1) - 1)
    step.positions.copy_(step.rows.prefix_lens.unsqueeze(1) + torch.arange(nodes, device="cuda"))
    layer.fmha.forward(qkv, None, None, data, Args(output=output))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.fmha.forward(qkv, None, None, data, Args(output=output))
    step.rows.mask.copy_(mask)
    step.positions.copy_(positions)
    qkv.copy_(layer.qkv(18))
    graph.replay()
    wanted = layer.expected(qkv, step, seen, [list(range(nodes))] * 3)
    torch.testing.assert_close(output.cpu().double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("generation", [1, 2])
def test_lanes_see_the_frontier_their_ancestors_and_no_column_without_a_page(generation):
    layer = Layer(generation=generation)
    frontier, topk, window = [14, 3, 11], 2, 6
    layer.fill_prefix(frontier)
    # Step 3 of lanes: columns 4 and 5 are this step's rows; those before were written by earlier steps.
    chosen = [[[0, 2, 4], [1, 3, 5]], [[0, 3, 4], [0, 2, 5]], [[1, 2, 4], [1, 3, 5]]]
    capacity = torch.tensor([16, 12, 12], dtype=torch.int32)
    tables = layer.pool.load_tables(layer.manager.offsets(BLOCKS, behind=3), slice(0, 3), capacity)
    starts = torch.tensor(frontier, dtype=torch.int32)
    slots = layer.pool.write_slots(starts, tables, window)
    earlier = torch.randn(3, 4, 2, layer.kv_heads, layer.dim)
    there = slots[0] >= 0
    assert there.tolist() == [[True] * 2 + [False] * 4, [True] * 6, [True] + [False] * 5]
    for b in range(3):
        for column in range(4):
            if there[b, column]:
                for kind in range(2):
                    row_of(layer.manager, LAYER, BLOCKS[b], frontier[b] + column, kind).copy_(
                        earlier[b, column, kind]
                    )
    seen = [[[c for c in columns if there[b, c]] for columns in rows] for b, rows in enumerate(chosen)]
    mask = torch.tensor([[[sum(1 << c for c in columns)] for columns in rows] for rows in seen])
    step = TreeStep(
        mode="lanes",
        pool=layer.pool,
        rows=TreeCascadeRows(prefix_lens=starts, mask=mask, window=window, max_prefix_len=24),
        positions=(starts.long() + 2).unsqueeze(1).expand(3, topk),
        write_slots=slots[:, :, 4:6],
        page_tables=tables,
    )
    poisoned = [memory.clone() for memory in layer.manager.memory]
    qkv, data = layer.qkv(6), metadata()
    publish(data, step)
    out = layer.run(qkv, data)

    fused = qkv.view(3, topk, -1, layer.dim)
    for b in range(3):
        for r in range(topk):
            keys = [
                row_of(layer.manager, LAYER, BLOCKS[b], position, 0).double()
                for position in range(frontier[b])
            ]
            values = [
                row_of(layer.manager, LAYER, BLOCKS[b], position, 1).double()
                for position in range(frontier[b])
            ]
            for column in seen[b][r]:
                keys.append(
                    earlier[b, column, 0].double()
                    if column < 4
                    else layer.turned(
                        fused[b, column - 4, layer.heads : layer.heads + layer.kv_heads], frontier[b] + 2
                    )
                )
                values.append(
                    earlier[b, column, 1].double()
                    if column < 4
                    else fused[b, column - 4, layer.heads + layer.kv_heads :].double()
                )
            wanted = by_head(layer, layer.turned(fused[b, r, : layer.heads], frontier[b] + 2), keys, values)
            torch.testing.assert_close(out[b * topk + r].double(), wanted, rtol=1e-4, atol=1e-4)
    # What went nowhere went nowhere: only the lanes' own slots differ.
    changed = sum(
        int((now.nan_to_num(9) != then.nan_to_num(9)).flatten(0, 2).any(1).sum())
        for now, then in zip(layer.manager.memory, poisoned, strict=True)
    )
    own_pages = {(int(slot) // layer.pool.page_size) for slot in slots[0, :, 4:6].flatten() if int(slot) >= 0}
    assert changed == 2 * len(own_pages)


def by_head(
    layer: Layer, q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    out, groups = [], layer.heads // layer.kv_heads
    for head in range(layer.heads):
        scores = torch.stack([key[head // groups] @ q[head] for key in keys])
        weights = (scores / (math.sqrt(layer.dim) * layer.q_scaling)).softmax(0)
        out.append(weights @ torch.stack([value[head // groups] for value in values]))
    return torch.cat(out)


def chain_step(layer: Layer, first: list[int], num_rows: int) -> TreeStep:
    starts = torch.tensor(first, dtype=torch.int32)
    tables = layer.pool.load_tables(layer.manager.offsets(BLOCKS), slice(0, len(first)), starts + num_rows)
    mask = torch.tensor([[(2 << r) - 1] for r in range(num_rows)]).expand(len(first), -1, -1)
    return TreeStep(
        mode="chain",
        pool=layer.pool,
        rows=TreeCascadeRows(prefix_lens=starts, mask=mask, window=num_rows, max_prefix_len=24),
        positions=starts.long().unsqueeze(1) + torch.arange(num_rows),
        write_slots=layer.pool.write_slots(starts, tables, num_rows),
        page_tables=tables,
    )


def test_chain_rows_see_the_rows_before_them():
    layer = Layer()
    first, num_rows = [7, 0, 4], 3
    layer.fill_prefix(first)
    step, qkv, data = chain_step(layer, first, num_rows), layer.qkv(9), metadata()
    wanted = layer.expected(qkv, step, [[list(range(r + 1)) for r in range(num_rows)]] * 3, [[0, 1, 2]] * 3)
    publish(data, step)
    torch.testing.assert_close(layer.run(qkv, data).double(), wanted, rtol=1e-4, atol=1e-4)
