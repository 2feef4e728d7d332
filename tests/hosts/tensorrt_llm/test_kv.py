"""Pools of both generations of managers: the same block is the same memory, and rows without a block go nowhere."""

from __future__ import annotations

import pytest
import torch

from tests.hosts.tensorrt_llm.pools import PAGE, FakeManager, row_of
from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.hosts.tensorrt_llm.kv import UNALLOCATED, TrtllmKVPool

SHAPES = [(2, 8), (3, 4), (2, 8), (2, 8), (3, 4)]
BLOCKS = [[5, 0, 3], [1, 4], [2, 6, 7, 8]]


def make(generation: int, **options) -> tuple[FakeManager, TrtllmKVPool]:
    manager = FakeManager(SHAPES, num_blocks=9, generation=generation, **options)
    return manager, TrtllmKVPool(manager, range(len(SHAPES)), max_batch=4, device="cpu")


@pytest.mark.parametrize("generation", [1, 2])
def test_a_page_of_a_view_is_the_block_that_the_offsets_name(generation):
    manager, pool = make(generation)
    tables = pool.load_tables(manager.offsets(BLOCKS), slice(0, 3))
    assert pool.num_groups == 2 and tables.shape == (2, 3, 6)
    for layer in range(len(SHAPES)):
        for row, blocks in enumerate(BLOCKS):
            for index, block in enumerate(blocks):
                page = int(tables[pool.group_of(layer), row, index])
                for field, view in enumerate(pool.views(layer)):
                    manager.rows(layer, block, field).fill_(layer + block / 16 + field / 256)
                    assert view is not None
                    assert torch.equal(view[page], manager.rows(layer, block, field)), (
                        f"{layer} {block} {field}"
                    )


@pytest.mark.parametrize("generation", [1, 2])
def test_latent_rows_have_no_values_and_blocks_of_one_field(generation):
    manager = FakeManager([(1, 8)] * 3, num_blocks=5, generation=generation, kv_factor=1)
    pool = TrtllmKVPool(manager, [0, 1, 2], max_batch=1, device="cpu")
    tables = pool.load_tables(manager.offsets([[4, 2]]), slice(0, 1))
    latent, values = pool.views(1)
    manager.rows(1, 2, 0).fill_(7.0)
    assert values is None and torch.equal(latent[int(tables[0, 0, 1])], manager.rows(1, 2, 0))


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("behind", [-1, 2, 40])
def test_what_lies_behind_the_last_block_is_no_page(generation, behind):
    manager, pool = make(generation)
    capacity = torch.tensor([3 * PAGE, PAGE + 1, 4 * PAGE - 3], dtype=torch.int32)
    tables = pool.load_tables(manager.offsets(BLOCKS, behind=behind), slice(0, 3), capacity)
    there = [[True] * len(blocks) + [False] * (6 - len(blocks)) for blocks in BLOCKS]
    for table in tables:
        assert (table >= 0).tolist() == there
        assert set(table[table < 0].tolist()) == {UNALLOCATED}


def test_tables_of_slices_keep_their_address_and_those_of_indices_are_the_callers():
    manager, pool = make(1)
    offsets = manager.offsets(BLOCKS)
    first = pool.load_tables(offsets, slice(0, 2))
    kept = first.clone()
    picked = pool.load_tables(offsets, torch.tensor([2, 0]))
    assert torch.equal(first, kept) and torch.equal(picked[:, 1], kept[:, 0])
    again = pool.load_tables(offsets, slice(1, 3))
    assert again.data_ptr() == first.data_ptr() and torch.equal(again[:, 1], picked[:, 0])


def test_slots_are_a_loop_over_positions_and_end_at_the_last_page():
    manager, pool = make(1)
    capacity = torch.tensor([3 * PAGE, 2 * PAGE, 4 * PAGE], dtype=torch.int32)
    tables = pool.load_tables(manager.offsets(BLOCKS, behind=1), slice(0, 3), capacity)
    first = torch.tensor([2, 2 * PAGE - 2, 6 * PAGE - 1], dtype=torch.int32)
    slots = pool.write_slots(first, tables, 7)
    for group, table in enumerate(tables.tolist()):
        for row, start in enumerate(first.tolist()):
            for index in range(7):
                number, offset = divmod(start + index, PAGE)
                page = table[row][number] if number < 6 else -1
                expected = page * PAGE + offset if page >= 0 else UNALLOCATED
                assert int(slots[group, row, index]) == expected


@pytest.mark.parametrize("generation", [1, 2])
def test_compaction_moves_the_path_of_every_target_layer_and_nothing_else(generation):
    manager = FakeManager(SHAPES, num_blocks=9, generation=generation)
    pool = TrtllmKVPool(manager, [0, 1, 2, 4], max_batch=4, device="cpu")
    for memory in manager.memory:
        memory.copy_(torch.arange(memory.numel()).view(memory.shape))
    before = [memory.clone() for memory in manager.memory]
    first = torch.tensor([3, 1], dtype=torch.int32)
    slots = pool.write_slots(first, pool.load_tables(manager.offsets(BLOCKS[:2]), slice(0, 2)), 5)
    path = torch.tensor([[0, 2, 4, -1, -1], [0, 1, 3, -1, -1]], dtype=torch.int32)
    KVCompactor(pool).compact_verify_window(path, slots, max_depth=3)

    old = FakeManager(SHAPES, num_blocks=9, generation=generation)
    old.memory = before
    expected = FakeManager(SHAPES, num_blocks=9, generation=generation)
    expected.memory = [memory.clone() for memory in before]
    for layer in (0, 1, 2, 4):
        for row, nodes in enumerate([[0, 2, 4], [0, 1, 3]]):
            for depth, node in enumerate(nodes):
                for field in range(2):
                    start = int(first[row])
                    moved = row_of(old, layer, BLOCKS[row], start + node, field)
                    row_of(expected, layer, BLOCKS[row], start + depth, field).copy_(moved)
    for memory, wanted in zip(manager.memory, expected.memory, strict=True):
        assert torch.equal(memory, wanted)


def test_a_pool_of_fp8_may_come_as_bytes_and_other_bytes_are_refused():
    manager = FakeManager([(2, 8)], num_blocks=3, generation=1, dtype=torch.float8_e4m3fn)
    pool = TrtllmKVPool(manager, [0], max_batch=1, device="cpu")
    assert pool.views(0)[0].dtype == torch.float8_e4m3fn
    manager.memory = [memory.view(torch.uint8) for memory in manager.memory]
    manager.dtype = "DataType.FP8"
    assert TrtllmKVPool(manager, [0], max_batch=1, device="cpu").views(0)[0].dtype == torch.float8_e4m3fn
    manager.dtype = "DataType.NVFP4"
    with pytest.raises(AssertionError, match="NVFP4"):
        TrtllmKVPool(manager, [0], max_batch=1, device="cpu")
