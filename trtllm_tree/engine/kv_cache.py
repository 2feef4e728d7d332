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
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max


@dataclass(frozen=True)
class LayerSpec:
    """Shape of one attention layer's cache.

    Attributes:
        num_kv_heads: Hkv; 1 for a latent (MLA) layer.
        head_dim: D; for a latent layer Dqk, the channels of a latent row, rotary ones included.
        value_dim: Dv, the leading channels of a latent row that are its value; None where K and V are stored apart.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None

    def __post_init__(self) -> None:
        assert self.value_dim is None or self.num_kv_heads == 1, "a latent layer has one KV head"
        assert self.value_dim is None or self.value_dim <= self.head_dim, "a value is part of its latent row"

    def pool_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """[num_pages, K and V, Hkv, page_size, D], which TensorRT-LLM calls HND; a latent pool has no such sides."""
        sides = (2,) if self.value_dim is None else ()
        return (num_pages, *sides, self.num_kv_heads, page_size, self.head_dim)


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
        self.pools = {
            name: torch.zeros(layer.pool_shape(num_pages, page_size), dtype=dtype, device=device)
            for name, layer in spec.layers.items()
        }
        self._latent = {name for name, layer in spec.layers.items() if layer.value_dim is not None}
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

    def views(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V views [num_pages, Hkv, page_size, D] of a layer; of a latent layer the latent rows and None."""
        pool = self.pools[name]
        return (pool, None) if name in self._latent else (pool[:, 0], pool[:, 1])

    def regions(self) -> list[torch.Tensor]:
        """The views of every layer. Latent rows are one region: keys and values in one place, to be moved once."""
        return [view for name in self.pools for view in self.views(name) if view is not None]


class KVCache:
    """All cache groups of an engine."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = tuple(groups)
        self._layers = {
            name: (index, *group.views(name)) for index, group in enumerate(groups) for name in group.pools
        }

    def layer(self, name: str) -> tuple[int, torch.Tensor, torch.Tensor | None]:
        """Group index and `CacheGroup.views` of a layer."""
        return self._layers[name]

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Reserve in every group."""
        for group in self.groups:
            group.reserve(slot, num_tokens)

    def release(self, slot: int) -> None:
        """Release in every group."""
        for group in self.groups:
            group.release(slot)

    def write(
        self, name: str, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store rows k, v [T, Hkv, D] of a layer at its group's `slots` int32 [T]; returns its K and V views.

        A latent layer takes its rows as `k` [T, 1, Dqk], and None for `v`. Rows are cast to the pool's dtype; an FP8
        pool keeps them unscaled and saturates: magnitudes above 448 become 448, NaN stays NaN.
        """
        index, k_cache, v_cache = self.layer(name)
        page_size = self.groups[index].page_size
        slots = slots.long()
        page, offset = slots // page_size, slots % page_size
        _store(k_cache, page, offset, k)
        assert (v is None) == (v_cache is None), "a latent layer has no V, every other has"
        if v_cache is not None and v is not None:
            _store(v_cache, page, offset, v)
        return k_cache, v_cache


def _store(cache: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, rows: torch.Tensor) -> None:
    if cache.dtype != _FP8:
        cache[page, :, offset] = rows.to(cache.dtype)
        return
    # Whether a cast to FP8 saturates by itself depends on the device and on torch's version; and indexing, which
    # has no kernels for FP8 everywhere, has them for bytes.
    rows = rows.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8)
    cache.view(torch.uint8)[page, :, offset] = rows.view(torch.uint8)
