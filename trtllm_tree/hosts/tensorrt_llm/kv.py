"""TensorRT-LLM's paged KV cache as the core sees it: regions to compact, page tables, and where rows go.

A manager addresses a layer by block offsets, one table a pool; the views of its layers differ in strides between the
managers of this and the last generation. Both say the same: an offset counts blocks of one K or V of one layer, so an
index into a layer's view is the offset divided by the blocks from one page of the view to the next. That is read
from the view's strides, and nothing here knows which manager it is. Must not know what a row holds, nor who drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

UNALLOCATED = -1


class TrtllmKVPool:
    """`ports.KVPool` over some layers of one KV cache manager; its groups are the manager's pools that hold them.

    Args:
        manager: a TensorRT-LLM KV cache manager of either generation.
        layers: global indices of attention layers, the draft's never among the target's.
        max_batch: largest number of sequences of one table.
        device: where tables live.
    """

    def __init__(
        self, manager: Any, layers: Sequence[int], *, max_batch: int, device: torch.device | str
    ) -> None:
        assert layers, "a pool without layers"
        self.device = torch.device(device)
        self.page_size = int(manager.tokens_per_block)
        self.max_pages = int(manager.max_blocks_per_seq)
        pool_of = {
            layer: int(manager.kv_cache_pool_mapping[manager.layer_offsets[layer]][0]) for layer in layers
        }
        self._pools = sorted(set(pool_of.values()))
        self._group_of = {layer: self._pools.index(pool) for layer, pool in pool_of.items()}
        buffers = {layer: _floats(manager.get_buffers(layer, kv_layout="HND"), manager) for layer in layers}
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._blocks_a_page: list[int] = []
        for group in range(len(self._pools)):
            self._add_group([layer for layer in layers if self._group_of[layer] == group], buffers)
        self._tables = torch.full(
            (len(self._pools), max_batch, self.max_pages), UNALLOCATED, dtype=torch.int32, device=device
        )
        self._page_index = torch.arange(self.max_pages, dtype=torch.int32, device=device)
        # Windows are short; a table of rows spares an arange a call.
        self._row_index = torch.arange(self.max_pages * self.page_size, dtype=torch.int32, device=device)

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self._pools)

    @property
    def layers(self) -> Sequence[int]:
        """Global indices of the layers."""
        return list(self._views)

    @property
    def is_latent(self) -> bool:
        """Whether the rows are latent (MLA)."""
        return all(values is None for _, values in self._views.values())

    def group_of(self, layer: int) -> int:
        """The group of a layer."""
        return self._group_of[layer]

    def views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V of a layer, [num_pages, Hkv, page_size, D] of any strides; V is None for latent rows."""
        return self._views[layer]

    def group_regions(self) -> Sequence[Sequence[torch.Tensor]]:
        """See `ports.KVPool.group_regions`."""
        return [
            [
                region
                for layer, views in self._views.items()
                if self._group_of[layer] == group
                for region in views
                if region is not None
            ]
            for group in range(self.num_groups)
        ]

    def load_tables(
        self, block_offsets: torch.Tensor, rows: slice | torch.Tensor, capacity: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The page tables of some sequences.

        Args:
            block_offsets: int32 [pools, sequences, 2, max_blocks], of the attention metadata; an entry < 0 is a
                placeholder.
            rows: the sequences, B in number. For a slice the result is a buffer of fixed address that the next slice
                overwrites; for indices, which no graph holds, it is the caller's own.
            capacity: int32 [B], rows that are allocated to each sequence. Behind its last block a sequence's table
                holds whatever was there before; None trusts every entry.

        Returns:
            int32 [G, B, max_pages]; `UNALLOCATED` where there is no page. Never waits for the device.
        """
        offsets = [block_offsets[pool, rows, 0] for pool in self._pools]
        batch = offsets[0].shape[0]
        tables = (
            self._tables[:, :batch] if isinstance(rows, slice) else torch.empty_like(self._tables[:, :batch])
        )
        for table, of_pool, blocks in zip(tables, offsets, self._blocks_a_page, strict=True):
            torch.div(of_pool, blocks, rounding_mode="floor", out=table)
        if capacity is not None:
            pages = torch.div(capacity + (self.page_size - 1), self.page_size, rounding_mode="floor")
            tables.masked_fill_(self._page_index >= pages.unsqueeze(1), UNALLOCATED)
        return tables

    def write_slots(self, first: torch.Tensor, tables: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Slots of `num_rows` positions from `first` on.

        Args:
            first: int32 [B], >= 0.
            tables: int32 [G, B, max_pages], of `load_tables`.

        Returns:
            int32 [G, B, num_rows], page * page_size + offset; `UNALLOCATED` where the table has no page.
        """
        positions = first.unsqueeze(1) + self._row_index[:num_rows]
        return torch.stack([slots_of(positions, table, self.page_size) for table in tables])

    def _add_group(self, layers: Sequence[int], buffers: dict[int, torch.Tensor]) -> None:
        """Views of one pool's layers, cut to the pages that all of them have."""
        num_pages = min(buffers[layer].shape[0] for layer in layers)
        steps = {layer: _blocks_a_page(buffers[layer]) for layer in layers}
        assert len(set(steps.values())) == 1, f"layers of one pool differ in pages: {steps}"
        self._blocks_a_page.append(steps[layers[0]])
        for layer in layers:
            pages = buffers[layer][:num_pages]
            self._views[layer] = (pages[:, 0], pages[:, 1] if pages.shape[1] > 1 else None)


def slots_of(positions: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots of positions int32 [B, R] by a page table int32 [B, max_pages]; `UNALLOCATED` where it has no page."""
    index = torch.div(positions, page_size, rounding_mode="floor")
    max_pages = table.shape[1]
    pages = table.gather(1, index.clamp(max=max_pages - 1).long())
    there = (pages >= 0) & (index < max_pages)
    return torch.where(there, pages * page_size + (positions - index * page_size), UNALLOCATED)


def _blocks_a_page(buffer: torch.Tensor) -> int:
    """Blocks of one K or V from one page of [num_pages, K and V, Hkv, page_size, D] to the next."""
    block = math.prod(buffer.shape[2:])
    if buffer.shape[0] == 1:
        return buffer.shape[1]
    step, rest = divmod(buffer.stride(0), block)
    assert not rest, f"pages {buffer.stride(0)} elements apart hold blocks of {block}"
    return step


def _floats(buffer: torch.Tensor, manager: Any) -> torch.Tensor:
    """The buffer in the dtype of its rows; a pool of FP8 may come as bytes."""
    if buffer.element_size() == 1 and not buffer.dtype.is_floating_point:
        assert str(manager.dtype).endswith("FP8"), f"a KV cache of {manager.dtype} cannot be read"
        return buffer.view(torch.float8_e4m3fn)
    return buffer
