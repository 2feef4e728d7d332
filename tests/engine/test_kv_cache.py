"""The paged KV cache: who owns which page, what the page tables say, and where rows land."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_tree.engine.kv_cache import DUMMY_PAGE, CacheGroup, GroupSpec, KVCache, LayerSpec, PageAllocator


def _group(
    name: str = "target",
    *,
    num_layers: int = 2,
    num_pages: int = 9,
    page_size: int = 16,
    num_slots: int = 4,
    max_pages: int = 6,
) -> CacheGroup:
    layers = {f"{name}.{index}": LayerSpec(num_kv_heads=2, head_dim=4) for index in range(num_layers)}
    return CacheGroup(
        GroupSpec(name, layers),
        num_pages=num_pages,
        page_size=page_size,
        num_slots=num_slots,
        max_pages=max_pages,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def _pages(group: CacheGroup, slot: int) -> list[int]:
    """A slot's pages as its table row shows them, checked to be in front of dummies only."""
    row = group.page_table[slot].tolist()
    pages = list(itertools.takewhile(lambda page: page != DUMMY_PAGE, row))
    assert set(row[len(pages) :]) <= {DUMMY_PAGE}
    return pages


def test_every_page_but_the_dummy_is_handed_out_once() -> None:
    allocator = PageAllocator(8)
    assert allocator.num_free == 7
    pages = [page for count in (3, 0, 4) for page in allocator.allocate(count)]
    assert sorted(pages) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.num_free == 0
    with pytest.raises(AssertionError, match="asked for 1 pages, 0 are free"):
        allocator.allocate(1)


def test_released_pages_come_back() -> None:
    allocator = PageAllocator(6)
    first = allocator.allocate(5)
    allocator.release(first[1:3])
    assert allocator.num_free == 2
    assert sorted(allocator.allocate(2)) == sorted(first[1:3])


@pytest.mark.parametrize("held_elsewhere", [0, 3])
def test_giving_a_page_back_twice_is_caught_whoever_holds_the_others(held_elsewhere: int) -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(2)
    allocator.allocate(held_elsewhere)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="twice"):
        allocator.release(pages[:1])


def test_the_dummy_page_cannot_be_given_back() -> None:
    allocator = PageAllocator(8)
    allocator.allocate(3)
    with pytest.raises(AssertionError):
        allocator.release([DUMMY_PAGE])


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_reserve_allocates_exactly_the_pages_that_the_rows_need(page_size: int) -> None:
    group = _group(page_size=page_size)
    for num_tokens, num_pages in ((0, 0), (1, 1), (page_size, 1), (page_size + 1, 2), (3 * page_size, 3)):
        group.reserve(0, num_tokens)
        assert len(_pages(group, 0)) == num_pages == group.pages_for(num_tokens)
        assert group.allocator.num_free == 8 - num_pages


def test_reserve_keeps_earlier_pages_and_never_shrinks() -> None:
    group = _group()
    group.reserve(1, 20)
    before = _pages(group, 1)
    group.reserve(2, 40)
    group.reserve(1, 50)
    grown = _pages(group, 1)
    assert grown[:2] == before and len(grown) == 4
    group.reserve(1, 3)
    assert _pages(group, 1) == grown
    assert set(grown).isdisjoint(_pages(group, 2))
    assert _pages(group, 0) == _pages(group, 3) == []


def test_release_empties_the_row_of_its_slot_alone() -> None:
    group = _group()
    group.reserve(0, 33)
    group.reserve(1, 16)
    others = _pages(group, 1)
    group.release(0)
    assert group.page_table[0].tolist() == [DUMMY_PAGE] * 6
    assert _pages(group, 1) == others
    assert group.allocator.num_free == 7
    group.release(0)
    assert group.allocator.num_free == 7


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 96)), max_size=25))
def test_pages_are_free_or_owned_by_one_slot_after_any_history(history: list[tuple[int, int]]) -> None:
    group = _group(num_pages=19)
    rows = [0, 0, 0]
    for slot, num_tokens in history:
        if num_tokens < 0:
            group.release(slot)
            rows[slot] = 0
        else:
            group.reserve(slot, num_tokens)
            rows[slot] = max(rows[slot], num_tokens)
        owned = [_pages(group, slot) for slot in range(3)]
        assert [len(pages) for pages in owned] == [-(-count // 16) for count in rows]
        flat = [page for pages in owned for page in pages]
        assert len(set(flat)) == len(flat) and set(flat) <= set(range(1, 19))
        assert group.allocator.num_free == 18 - len(flat)
        # The pad row stays all dummy.
        assert _pages(group, 3) == []


def test_groups_with_different_page_sizes_count_their_own_pages() -> None:
    small, large = _group("target", page_size=16, num_pages=9), _group("draft", page_size=64, num_pages=4)
    cache = KVCache([small, large])
    cache.reserve(2, 70)
    assert (len(_pages(small, 2)), len(_pages(large, 2))) == (5, 2)
    assert (small.allocator.num_free, large.allocator.num_free) == (3, 1)
    cache.release(2)
    assert (small.allocator.num_free, large.allocator.num_free) == (8, 3)
    assert not small.page_table.any() and not large.page_table.any()


def test_layers_are_found_by_name_in_their_group() -> None:
    cache = KVCache([_group("target", page_size=16), _group("draft", page_size=64, num_layers=1)])
    for name, index in (("target.0", 0), ("target.1", 0), ("draft.0", 1)):
        group, k_cache, v_cache = cache.layer(name)
        pool = cache.groups[index].pools[name]
        assert group == index
        assert k_cache.data_ptr() == pool[:, 0].data_ptr() and v_cache.data_ptr() == pool[:, 1].data_ptr()


def test_regions_are_the_key_and_value_views_of_every_layer() -> None:
    group = _group(num_layers=3)
    addresses = {region.data_ptr() for region in group.regions()}
    views = [pool[:, side] for pool in group.pools.values() for side in (0, 1)]
    assert addresses == {view.data_ptr() for view in views} and len(addresses) == 6
    assert all(region.shape == (9, 2, 16, 4) for region in group.regions())


@pytest.mark.parametrize("name", ["target.1", "draft.0"])
def test_written_rows_land_in_their_slots_and_nowhere_else(name: str) -> None:
    cache = KVCache([_group("target", page_size=16), _group("draft", page_size=64, num_pages=5)])
    generator = torch.Generator().manual_seed(0)
    for group in cache.groups:
        for pool in group.pools.values():
            pool.fill_(-1.0)
    page_size = cache.groups[cache.layer(name)[0]].page_size
    positions = [(3, 5), (1, 0), (4, page_size - 1)]
    slots = torch.tensor([page * page_size + offset for page, offset in positions], dtype=torch.int32)
    k, v = torch.randn(2, 3, 2, 4, generator=generator)
    k_cache, v_cache = cache.write(name, slots, k, v)
    for row, (page, offset) in enumerate(positions):
        torch.testing.assert_close(k_cache[page, :, offset], k[row], rtol=0, atol=0)
        torch.testing.assert_close(v_cache[page, :, offset], v[row], rtol=0, atol=0)
    changed = sum(int((pool != -1).sum()) for group in cache.groups for pool in group.pools.values())
    assert changed == 2 * k.numel()


def test_a_latent_layer_keeps_each_row_once() -> None:
    """Key and value are one row, beside a layer of grouped heads in the same group."""
    layers = {"grouped": LayerSpec(2, 4), "latent": LayerSpec(1, 6, value_dim=4)}
    group = CacheGroup(
        GroupSpec("target", layers),
        num_pages=5,
        page_size=16,
        num_slots=2,
        max_pages=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache = KVCache([group])
    pool = group.pools["latent"]
    assert pool.shape == (5, 1, 16, 6) and len(group.regions()) == 3
    rows = torch.randn(2, 1, 6, generator=torch.Generator().manual_seed(1))
    k_cache, v_cache = cache.write("latent", torch.tensor([3 * 16 + 7, 16], dtype=torch.int32), rows, None)
    assert v_cache is None and k_cache.data_ptr() == pool.data_ptr()
    assert torch.equal(pool[3, :, 7], rows[0]) and torch.equal(pool[1, :, 0], rows[1])
    assert int((pool != 0).sum()) == rows.numel() and not group.pools["grouped"].any()


def test_a_layer_is_written_with_the_parts_that_it_has() -> None:
    layers = {"grouped": LayerSpec(1, 6), "latent": LayerSpec(1, 6, value_dim=4)}
    group = CacheGroup(
        GroupSpec("target", layers),
        num_pages=2,
        page_size=16,
        num_slots=1,
        max_pages=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    rows, slots = torch.ones(1, 1, 6), torch.tensor([16], dtype=torch.int32)
    for name, value in (("grouped", None), ("latent", rows)):
        with pytest.raises(AssertionError, match="latent"):
            KVCache([group]).write(name, slots, rows, value)
    with pytest.raises(AssertionError, match="one KV head"):
        LayerSpec(2, 6, value_dim=4)
