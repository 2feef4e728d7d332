"""Row compaction of several slot numberings in one call: groups that differ in everything, addresses of any size.

Each group against a slow oracle of its own, as torch reference and as Triton kernel (interpreted where there is no
GPU). What one group alone must do stands in test_tree_speculative.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from trtllm_tree.kernels.compact_window_rows import RowTable, compact_window_rows
from trtllm_tree.kernels.compact_window_rows import triton as compact_triton
from trtllm_tree.kernels.compact_window_rows.reference import reference as compact_reference

RUNS = (compact_reference, compact_triton.launch)
BATCH, NUM_NODES = 3, 24


@dataclass
class Group:
    """Random bytes, the regions that are views of them, and the window's slots there, [B][N]."""

    buffer: torch.Tensor
    regions: list[torch.Tensor]
    slots: list[list[int]]

    def expected(self, paths: list[list[int]]) -> torch.Tensor:
        """The buffer after every row has moved once, one row at a time from a copy."""
        moved = self.buffer.clone()
        for region in self.regions:
            like, size = region.view(torch.uint8), region.shape[2]
            offset = region.data_ptr() - self.buffer.data_ptr()
            new, old = (
                torch.as_strided(buffer, like.shape, like.stride(), offset) for buffer in (moved, self.buffer)
            )
            for slots, path in zip(self.slots, paths, strict=True):
                for target, node in zip(slots, path, strict=True):
                    if node >= 0:
                        row = old[slots[node] // size, :, slots[node] % size]
                        new[target // size, :, target % size] = row
        return moved


def make_group(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int, int], *, layers: int, nhd: bool = False
) -> Group:
    """K and V of some layers in one buffer, pages outermost; shape is (pages, heads, page_size, D)."""
    pages, heads, page_size, dim = shape
    inner = (page_size, heads) if nhd else (heads, page_size)
    bytes_of_dim = dim * dtype.itemsize
    buffer = torch.randint(0, 256, (pages, layers, 2, *inner, bytes_of_dim), dtype=torch.uint8).to(device)
    views = [buffer.view(dtype)[:, layer, side] for layer in range(layers) for side in (0, 1)]
    slots = torch.randperm(pages * page_size)[: BATCH * NUM_NODES].view(BATCH, NUM_NODES).tolist()
    return Group(buffer, [view.transpose(1, 2) if nhd else view for view in views], slots)


def some_paths(seed: int) -> list[list[int]]:
    """A path that moves more rows than one block, a random one, and one that moves nothing."""
    nodes = sorted(random.Random(seed).sample(range(1, NUM_NODES), 9))
    paths = [[0, 1, 2, *range(5, NUM_NODES)], [0, *nodes], [0, 1, 2, 3]]
    return [path + [-1] * (NUM_NODES - len(path)) for path in paths]


def strided_slots(groups: list[Group], device: str) -> torch.Tensor:
    """The groups' slots int32 [G, B, N] as a view: B outermost, garbage around every row."""
    filled = torch.full((BATCH + 1, len(groups) + 2, NUM_NODES + 3), 2**31 - 1, dtype=torch.int32)
    view = filled.to(device)[:BATCH, 1:-1, 2:-1].transpose(0, 1)
    view.copy_(torch.tensor([group.slots for group in groups]))
    return view


@pytest.mark.parametrize("max_programs", [1, 7, 4 * 132])
def test_one_call_moves_the_rows_of_groups_that_differ_in_everything(device, monkeypatch, max_programs):
    # With few programs, each moves many tiles, of several groups.
    monkeypatch.setattr(compact_triton, "_MAX_PROGRAMS", max_programs)
    torch.manual_seed(max_programs)
    groups = [
        make_group(device, torch.bfloat16, (20, 2, 4, 16), layers=2),
        make_group(device, torch.float8_e4m3fn, (6, 1, 16, 24), layers=1, nhd=True),
        make_group(device, torch.float32, (80, 5, 1, 120), layers=1),
        make_group(device, torch.bfloat16, (13, 3, 6, 12), layers=1, nhd=True),
    ]
    table = RowTable.build([group.regions for group in groups])
    slots = strided_slots(groups, device)
    paths = some_paths(max_programs)
    path = torch.tensor(paths, dtype=torch.int32, device=device)
    before = [group.buffer.clone() for group in groups]
    expected = [group.expected(paths) for group in groups]
    assert not any(torch.equal(new, old) for new, old in zip(expected, before, strict=True))
    # Twice from the same start: no result may hang on the order in which programs run.
    for run in (*RUNS, compact_triton.launch):
        for group, old in zip(groups, before, strict=True):
            group.buffer.copy_(old)
        run(table, slots, path, max_depth=NUM_NODES)
        for index, group in enumerate(groups):
            assert torch.equal(group.buffer, expected[index]), f"group {index}, {run.__module__}"


def test_groups_that_share_a_region_each_move_their_own_window(device):
    torch.manual_seed(5)
    first = make_group(device, torch.bfloat16, (40, 2, 4, 8), layers=1)
    free = sorted(set(range(160)) - {slot for slots in first.slots for slot in slots})
    random.Random(5).shuffle(free)
    second = Group(first.buffer, first.regions, [free[:NUM_NODES], free[24:48], free[48:72]])
    paths = some_paths(5)
    before = first.buffer.clone()
    first.buffer.copy_(first.expected(paths))
    both = second.expected(paths)
    table = RowTable.build([first.regions, second.regions])
    path = torch.tensor(paths, dtype=torch.int32, device=device)
    for run in RUNS:
        first.buffer.copy_(before)
        run(table, strided_slots([first, second], device), path, max_depth=NUM_NODES)
        assert torch.equal(first.buffer, both), run.__module__


@pytest.mark.parametrize("far", ["page", "head", "token"])
def test_rows_lie_further_apart_than_32_bits_of_words_reach(device, far):
    # Untouched memory of a host costs nothing, so the storage may be as large as the offsets.
    size = 2**31
    storage = torch.empty(2 * size + 4096, dtype=torch.uint8, device=device)
    shape, stride = {
        "page": ((3, 2, 4, 5), (size, 20, 5)),
        "head": ((3, 3, 4, 5), (20, size, 5)),
        "token": ((2, 2, 3, 5), (5, 10, size)),
    }[far]
    region = storage.as_strided(shape, (*stride, 1))
    rows = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    last = shape[0] * shape[2] - 1
    slots = torch.tensor([[[0, last, 2, last - 2]]], dtype=torch.int32, device=device)
    path = torch.tensor([[0, 2, 3, -1]], dtype=torch.int32, device=device)
    expected = rows.clone()
    for target, source in ((last, 2), (2, last - 2)):
        new, old = divmod(target, shape[2]), divmod(source, shape[2])
        expected[new[0], :, new[1]] = rows[old[0], :, old[1]]
    table = RowTable.build([[region]])
    assert table.word_bytes == 1
    for run in RUNS:
        region.copy_(rows)
        run(table, slots, path, max_depth=4)
        assert torch.equal(region, expected), run.__module__


def test_the_word_fits_every_group_and_the_tiles_cover_every_word_once(device):
    wide = make_group(device, torch.float32, (20, 5, 4, 120), layers=1)
    narrow = make_group(device, torch.bfloat16, (20, 2, 4, 6), layers=1)
    alone, both = RowTable.build([wide.regions]), RowTable.build([wide.regions, narrow.regions])
    assert (alone.word_bytes, alone.run_words) == (8, 4)
    assert (both.word_bytes, both.run_words) == (4, 1)
    covered = {(group, address): set() for group, address, *_ in both.tiles.tolist()}
    for group, address, first, words, *_ in both.tiles.tolist():
        mine = set(range(first, min(first + both.tile_words, words)))
        assert not covered[group, address] & mine
        covered[group, address] |= mine
    regions = [(0, wide, 5 * 120), (1, narrow, 2 * 3)]
    assert covered == {
        (group, region.data_ptr()): set(range(words))
        for group, held, words in regions
        for region in held.regions
    }


def test_slots_of_other_groups_than_the_table_are_a_programmer_error(device):
    group = make_group(device, torch.float32, (40, 1, 4, 8), layers=1)
    table = RowTable.build([group.regions])
    path = torch.tensor(some_paths(0), dtype=torch.int32, device=device)
    with pytest.raises(AssertionError, match=r"\[G, B, N\]"):
        compact_window_rows(table, strided_slots([group, group], device), path)
    with pytest.raises(AssertionError, match="no groups"):
        RowTable.build([])
