"""The paged KV cache: page accounting per cache group, and the pools.

A cache group is a set of layers that share one page table. Page 0 is the dummy page: table entries that are
not allocated point to it, so that a write past a request's pages harms nobody. The last table row belongs to
pad rows and stays all dummy. Must not know what is written or who attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DUMMY_PAGE = 0


@dataclass(frozen=True)
class LayerSpec:
    """Shape of one attention layer's cache."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class GroupSpec:
    """A cache group: its name and its layers, keyed by the name under which they are looked up."""

    name: str
    layers: dict[str, LayerSpec]


class PageAllocator:
    """Free list over pages 1 .. num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; admission has made sure that they exist."""
        assert count <= len(self._free), f"asked for {count} pages, {len(self._free)} are free"
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        assert self._taken.issuperset(pages), "a page was given back twice, or never taken"
        self._taken.difference_update(pages)
        self._free.extend(pages)


class CacheGroup:
    """One page table and the pools of its layers.

    Args:
        spec: the layers.
        num_pages: pages of every layer's pool, the dummy one included.
        page_size: KV rows of a page.
        num_slots: page-table rows, the pad row included.
        max_pages: columns of the page table.
    """

    def __init__(
        self,
        spec: GroupSpec,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name, self.page_size = spec.name, page_size
        self.allocator = PageAllocator(num_pages)
        self.page_table = torch.full((num_slots, max_pages), DUMMY_PAGE, dtype=torch.int32, device=device)
        # [num_pages, K and V, Hkv, page_size, D]: the layout that TensorRT-LLM calls HND.
        self.pools = {
            name: torch.zeros(
                num_pages, 2, layer.num_kv_heads, page_size, layer.head_dim, dtype=dtype, device=device
            )
            for name, layer in spec.layers.items()
        }
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` rows."""
        return -(-num_tokens // self.page_size)

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make sure that pool slot `slot` has pages for `num_tokens` rows."""
        have = len(self._pages[slot])
        missing = self.pages_for(num_tokens) - have
        if missing <= 0:
            return
        pages = self.allocator.allocate(missing)
        self._pages[slot].extend(pages)
        new = torch.tensor(pages, dtype=torch.int32)
        self.page_table[slot, have : have + missing].copy_(new)

    def release(self, slot: int) -> None:
        """Give back all pages of `slot`."""
        self.allocator.release(self._pages[slot])
        self._pages[slot] = []
        self.page_table[slot].fill_(DUMMY_PAGE)

    def regions(self) -> list[torch.Tensor]:
        """K and V views [num_pages, Hkv, page_size, D] of every layer."""
        return [pool[:, side] for pool in self.pools.values() for side in (0, 1)]


class KVCache:
    """All cache groups of an engine."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = tuple(groups)
        self._layers = {
            name: (index, pool) for index, group in enumerate(groups) for name, pool in group.pools.items()
        }

    def layer(self, name: str) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Group index, K and V views [num_pages, Hkv, page_size, D] of a layer."""
        index, pool = self._layers[name]
        return index, pool[:, 0], pool[:, 1]

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Reserve in every group."""
        for group in self.groups:
            group.reserve(slot, num_tokens)

    def release(self, slot: int) -> None:
        """Release in every group."""
        for group in self.groups:
            group.release(slot)

    def write(
        self, name: str, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store rows k, v [T, Hkv, D] of a layer at its group's `slots` int32 [T]; returns its K and V views."""
        index, k_cache, v_cache = self.layer(name)
        page_size = self.groups[index].page_size
        slots = slots.long()
        page, offset = slots // page_size, slots % page_size
        k_cache[page, :, offset] = k
        v_cache[page, :, offset] = v
        return k_cache, v_cache
