"""Invariants I3 and I4: position follows depth, slot follows node index, and the two shifts cancel."""

from __future__ import annotations

import random

import pytest
import torch

from tests.oracles import trees
from trtllm_tree.tree.spec import TreeSpec

MAX_BATCH = 4
SIZES = [8, 64, 65]


def make_spec(device: str, num_nodes: int, width: int = 3) -> TreeSpec:
    return TreeSpec(MAX_BATCH, num_nodes, torch.zeros(MAX_BATCH * num_nodes, width, device=device))


def ints(rows: list[list[int]], device: str) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


def chain_positions(committed: list[int], num_nodes: int, device: str, dtype=torch.int64) -> torch.Tensor:
    rows = [[length + node for node in range(num_nodes)] for length in committed]
    return torch.tensor(rows, dtype=dtype, device=device)


def buffers(spec: TreeSpec) -> list[torch.Tensor]:
    return [spec.parent_buf, spec.depth_buf, spec.mask_buf, spec.shift_buf]


@pytest.mark.parametrize("num_nodes", SIZES)
def test_fresh_spec_is_the_chain(device, num_nodes):
    spec = make_spec(device, num_nodes)
    chain = trees.chain(num_nodes)
    assert spec.parent_buf.tolist() == [chain] * MAX_BATCH
    assert spec.depth_buf.tolist() == [list(range(num_nodes))] * MAX_BATCH
    assert spec.mask_buf.tolist() == [trees.mask_words(chain)] * MAX_BATCH
    assert not spec.shift_buf.any()
    # Graph warmup replays compaction without a load: nothing may move then.
    positions = chain_positions([5, 0, 9], num_nodes, device)
    expected = positions.clone()
    path = ints([[0] + [-1] * (num_nodes - 1)] * 3, device)
    spec.compact_rows(path, positions, max_depth=num_nodes)
    assert torch.equal(positions, expected)


@pytest.mark.parametrize("num_nodes", SIZES)
def test_loading_chains_reproduces_the_fresh_buffers(device, num_nodes):
    spec = make_spec(device, num_nodes)
    fresh = [buffer.clone() for buffer in buffers(spec)]
    rng = random.Random(num_nodes)
    maps = [trees.random_tree(rng, num_nodes) for _ in range(MAX_BATCH)] + [trees.chain(num_nodes)]
    parent_map = ints(maps, device)
    positions = chain_positions([0] * MAX_BATCH, num_nodes, device)
    spec.load_step(parent_map, torch.arange(MAX_BATCH, device=device), positions.clone())
    assert not any(torch.equal(new, old) for new, old in zip(buffers(spec), fresh, strict=True))
    expected = positions.clone()
    spec.load_step(parent_map, torch.full((MAX_BATCH,), MAX_BATCH, device=device), positions)
    assert all(torch.equal(new, old) for new, old in zip(buffers(spec), fresh, strict=True))
    assert torch.equal(positions, expected)


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_positions_are_vc_plus_depth_between_the_shifts(device, num_nodes, dtype):
    rng = random.Random(num_nodes)
    spec = make_spec(device, num_nodes)
    committed = [7, 0, 1000]
    maps = [trees.random_tree(rng, num_nodes) for _ in range(6)]
    slots = [4, 0, 3]
    positions = chain_positions(committed, num_nodes, device, dtype)
    before = positions.clone()
    untouched = [buffer[3:].clone() for buffer in buffers(spec)]
    tree = spec.load_step(ints(maps, device), torch.tensor(slots, device=device), positions)
    chosen = [maps[slot] for slot in slots]
    assert tree.parents.tolist() == chosen
    assert tree.depths.tolist() == [trees.depths(parents) for parents in chosen]
    assert tree.ancestor_mask.tolist() == [trees.mask_words(parents) for parents in chosen]
    assert positions.tolist() == [
        [length + depth for depth in trees.depths(parents)]
        for length, parents in zip(committed, chosen, strict=True)
    ]
    paths = [trees.random_path(rng, parents) for parents in chosen]
    spec.compact_rows(ints(paths, device), positions, max_depth=num_nodes)
    assert torch.equal(positions, before)
    assert all(torch.equal(new[3:], old) for new, old in zip(buffers(spec), untouched, strict=True))


@pytest.mark.parametrize("num_nodes", SIZES)
def test_the_two_shifts_cancel_for_any_content_of_the_shift_buffer(device, num_nodes):
    # compact_rows must take away exactly what the shift buffer says, and load_step must add exactly that.
    torch.manual_seed(num_nodes)
    spec = make_spec(device, num_nodes)
    spec.shift_buf.copy_(torch.randint(-(2**20), 2**20, spec.shift_buf.shape))
    before = chain_positions([3, 50, 0, 8], num_nodes, device)
    positions = before + spec.shift_buf
    root_only = ints([[0] + [-1] * (num_nodes - 1)] * MAX_BATCH, device)
    spec.compact_rows(root_only, positions, max_depth=num_nodes)
    assert torch.equal(positions, before)
    # Parents that are no tree at all (poisoned slots) still cancel.
    parent_map = torch.randint(-5, num_nodes + 5, (MAX_BATCH, num_nodes), dtype=torch.int32).to(device)
    for _ in range(2):
        spec.load_step(parent_map, torch.arange(MAX_BATCH, device=device), positions)
        assert torch.equal(positions, before + spec.shift_buf)
        spec.compact_rows(root_only, positions, max_depth=num_nodes)
        assert torch.equal(positions, before)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.float32, 7),
        (torch.bfloat16, 7),
        (torch.float16, 64),
        (torch.float8_e4m3fn, 5),
        (torch.float64, 1),
    ],
)
@pytest.mark.parametrize(("num_nodes", "max_depth"), [(8, 8), (65, 65), (32, 6)])
def test_the_accepted_rows_move_to_the_front_and_no_other_row_changes(
    device, num_nodes, max_depth, dtype, width
):
    torch.manual_seed(num_nodes + width)
    rng = random.Random(num_nodes + width)
    size = torch.empty(0, dtype=dtype).element_size()
    words = torch.randint(0, 256, (MAX_BATCH * num_nodes, width * size), dtype=torch.uint8).to(device)
    spec = TreeSpec(MAX_BATCH, num_nodes, words.view(dtype))
    # Two spines side by side: each step down the longest path skips a row.
    spines = [-1, 0, *(node - 2 for node in range(2, num_nodes))]
    maps = [trees.random_tree(rng, num_nodes), spines, trees.random_tree(rng, num_nodes)]
    paths = [trees.random_path(rng, parents, max_depth) for parents in maps]
    longest = trees.path_to(spines, num_nodes - 1)[:max_depth]
    paths[1] = longest + [-1] * (num_nodes - len(longest))
    rows = words.clone().view(MAX_BATCH, num_nodes, -1)
    for request, path in enumerate(paths):
        for depth, node in enumerate(path):
            if node >= 0:
                rows[request, depth] = words.view(MAX_BATCH, num_nodes, -1)[request, node]
    positions = chain_positions([4, 2, 77], num_nodes, device)
    spec.load_step(ints(maps, device), torch.arange(3, device=device), positions)
    between = positions.tolist()
    spec.compact_rows(ints(paths, device), positions, max_depth=max_depth)
    assert torch.equal(words, rows.view_as(words))
    # Each moved row has the position that it was computed with.
    for request, path in enumerate(paths):
        for depth, node in enumerate(path):
            assert node < 0 or positions[request, depth].item() == between[request][node]
