"""Invariant I8: the accepted path's KV moves to the window's front, once per cache group, and no other KV."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from tests.oracles import trees
from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.engine.kv_cache import KVCache, LayerSpec
from trtllm_tree.hosts.embedded.kv import DRAFT_GROUP, EmbeddedKVPool, build_cache

NUM_NODES, BATCH = 9, 3


class Group:
    """A cache group with its own pages, its own window slots and random content."""

    def __init__(
        self,
        device: str,
        *,
        pages: int,
        page_size: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        layers: int,
    ) -> None:
        self.page_size = page_size
        self.pools = [
            torch.randint(0, 256, (pages, 2, heads, page_size, dim), dtype=torch.uint8).to(device).view(dtype)
            if dtype.itemsize == 1
            else torch.randn(pages, 2, heads, page_size, dim).to(device, dtype)
            for _ in range(layers)
        ]
        slots = torch.randperm((pages - 1) * page_size)[: BATCH * NUM_NODES] + page_size
        self.slots = slots.view(BATCH, NUM_NODES).int().to(device)

    @property
    def regions(self) -> list[torch.Tensor]:
        return [pool[:, side] for pool in self.pools for side in (0, 1)]

    def expected(self, paths: list[list[int]]) -> list[torch.Tensor]:
        """The pools after every row has moved once, row by row from a copy."""
        moved = [pool.clone() for pool in self.pools]
        for request, path in enumerate(paths):
            for depth, node in enumerate(path):
                if node >= 0:
                    source, target = self.slots[request, node].item(), self.slots[request, depth].item()
                    for new, old in zip(moved, self.pools, strict=True):
                        row = old[source // self.page_size, :, :, source % self.page_size]
                        new[target // self.page_size, :, :, target % self.page_size] = row
        return moved


class FakePool:
    """`ports.KVPool` over given regions."""

    def __init__(self, *groups: Sequence[torch.Tensor]) -> None:
        self._groups = groups

    def group_regions(self) -> Sequence[Sequence[torch.Tensor]]:
        return self._groups


def same(pools: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(pools, expected, strict=True)
    )


def some_paths() -> list[list[int]]:
    rng = random.Random(8)
    every_second = [0, 2, 4, 6, 8, -1, -1, -1, -1]
    return [every_second, trees.random_path(rng, trees.random_tree(rng, NUM_NODES)), [0] + [-1] * 8]


def test_each_group_moves_its_rows_at_its_own_window(device):
    torch.manual_seed(0)
    full = Group(device, pages=12, page_size=4, heads=2, dim=8, dtype=torch.bfloat16, layers=2)
    other = Group(device, pages=5, page_size=16, heads=1, dim=12, dtype=torch.float8_e4m3fn, layers=1)
    draft = Group(device, pages=9, page_size=4, heads=2, dim=8, dtype=torch.float32, layers=1)
    paths = some_paths()
    expected = [group.expected(paths) for group in (full, other)]
    untouched = [pool.clone() for pool in draft.pools]
    assert not same(full.pools, expected[0]) and not same(other.pools, expected[1])

    compactor = KVCompactor(FakePool(full.regions, other.regions))
    path = torch.tensor(paths, dtype=torch.int32, device=device)
    compactor.compact_verify_window(path, torch.stack([full.slots, other.slots]), max_depth=NUM_NODES)
    assert same(full.pools, expected[0]) and same(other.pools, expected[1])
    assert same(draft.pools, untouched)


def test_layers_that_share_a_region_move_it_once(device):
    # Moved twice, the second row of the path 0, 2, 4, ... would end as the fourth.
    torch.manual_seed(1)
    group = Group(device, pages=12, page_size=4, heads=2, dim=8, dtype=torch.float32, layers=2)
    paths = some_paths()
    expected = group.expected(paths)
    shared = [*group.regions, *group.regions[:2]]
    path = torch.tensor(paths, dtype=torch.int32, device=device)
    KVCompactor(FakePool(shared)).compact_verify_window(path, group.slots[None], max_depth=NUM_NODES)
    assert same(group.pools, expected)


def test_columns_behind_the_longest_path_are_not_looked_at(device):
    torch.manual_seed(2)
    group = Group(device, pages=12, page_size=4, heads=1, dim=8, dtype=torch.float32, layers=1)
    expected = group.expected([path[:3] for path in some_paths()])
    path = torch.tensor(some_paths(), dtype=torch.int32, device=device)
    KVCompactor(FakePool(group.regions)).compact_verify_window(path, group.slots[None], max_depth=3)
    assert same(group.pools, expected)


def test_a_group_without_slots_is_a_programmer_error(device):
    group = Group(device, pages=12, page_size=4, heads=1, dim=8, dtype=torch.float32, layers=1)
    compactor = KVCompactor(FakePool(group.regions))
    path = torch.tensor(some_paths(), dtype=torch.int32, device=device)
    for slots in (group.slots[None][:0], torch.stack([group.slots, group.slots])):
        with pytest.raises(AssertionError, match="must be"):
            compactor.compact_verify_window(path, slots, max_depth=3)


def embedded_cache(device: str) -> KVCache:
    return build_cache(
        {"0": LayerSpec(2, 8), "1": LayerSpec(2, 8)},
        LayerSpec(2, 8),
        num_tokens=48,
        page_size=4,
        max_batch_size=BATCH,
        max_extent=16,
        dtype=torch.float32,
        device=torch.device(device),
    )


def test_the_embedded_pool_offers_the_target_layers_and_never_the_draft_layer(device):
    cache = embedded_cache(device)
    groups = EmbeddedKVPool(cache).group_regions()
    offered = {region.data_ptr() for regions in groups for region in regions}
    target = {cache.layer(name)[side].data_ptr() for name in ("0", "1") for side in (1, 2)}
    _, draft_k, draft_v = cache.layer("draft.0")
    assert offered == target
    assert not offered & {draft_k.data_ptr(), draft_v.data_ptr()}
    assert len(groups) == sum(group.name != DRAFT_GROUP for group in cache.groups) == 1


def test_a_latent_row_moves_once_and_its_value_moves_with_it(device):
    """Moved a second time, as its own value, row 2 of the path 0, 2, 4, ... would end as row 4."""
    torch.manual_seed(3)
    cache = build_cache(
        {"0": LayerSpec(1, 12, value_dim=8), "1": LayerSpec(1, 12, value_dim=8)},
        LayerSpec(2, 8),
        num_tokens=64,
        page_size=4,
        max_batch_size=BATCH,
        max_extent=16,
        dtype=torch.float32,
        device=torch.device(device),
    )
    target, draft = cache.groups
    for pool in (*target.pools.values(), *draft.pools.values()):
        pool.copy_(torch.randn(pool.shape))
    assert [region.shape for region in target.regions()] == [(17, 1, 4, 12)] * 2
    slots = (4 + torch.randperm(64)[: BATCH * NUM_NODES]).view(1, BATCH, NUM_NODES).int().to(device)
    untouched = {name: pool.clone() for group in cache.groups for name, pool in group.pools.items()}

    path = torch.tensor(some_paths(), dtype=torch.int32, device=device)
    KVCompactor(EmbeddedKVPool(cache)).compact_verify_window(path, slots, max_depth=NUM_NODES)
    for name, pool in target.pools.items():
        before, expected = untouched[name].view(-1, 12), untouched[name].view(-1, 12).clone()
        for request, nodes in enumerate(some_paths()):
            for depth, node in enumerate(nodes):
                if node >= 0:
                    expected[slots[0, request, depth]] = before[slots[0, request, node]]
        assert torch.equal(pool.view(-1, 12), expected) and not torch.equal(expected, before)
        values = pool[..., :8]
        assert torch.equal(values.reshape(-1, 8), expected[:, :8])
    assert all(torch.equal(pool, untouched[name]) for name, pool in draft.pools.items())
