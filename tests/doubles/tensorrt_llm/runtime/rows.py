"""Rows of the paged cache by request and position, and which rows a call of one phase has."""

from __future__ import annotations

from typing import Any

import torch


def rows_of(params: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Request (as a row of the batch) and position of each row of a call, if they follow each other."""
    meta, first, count = params.meta, params.seq_offset, params.num_requests
    lens = meta.seq_lens_cuda[first : first + count].long()
    kv_lens = meta.kv_lens_cuda_runtime[first : first + count].long()
    rows = torch.arange(params.num_tokens, device=lens.device)
    starts = lens.cumsum(0) - lens
    owner = torch.searchsorted(starts, rows, right=True) - 1
    return first + owner, kv_lens[owner] - lens[owner] + rows - starts[owner]


def key_bound(meta: Any, first: int, count: int) -> int:
    """A bound of the keys that these requests have, from the host."""
    if meta.is_cuda_graph:
        return meta.max_seq_len
    # The drafter's rows are behind those that the host counted.
    return int(meta.kv_lens[first : first + count].max()) + 1


class LayerRows:
    """One layer's rows of the paged cache, by request row of the batch and position."""

    def __init__(self, attn: Any, meta: Any) -> None:
        manager = meta.kv_cache_manager
        self._view = manager.get_buffers(attn.layer_idx, kv_layout="HND")
        self._rows = manager.tokens_per_block
        pool = int(manager.kv_cache_pool_mapping[attn.get_local_layer_idx(meta), 0])
        step = manager.kv_factor * (1 if is_v2(manager) else manager.layers_in_pool[pool])
        # Both fields of a block have the same index.
        self._pages = torch.div(meta.kv_cache_block_offsets[pool, :, 0], step, rounding_mode="floor").long()

    def write(
        self, request: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
    ) -> None:
        page = self._pages[request, positions // self._rows]
        if page.device.type == "cpu":
            assert bool((page >= 0).all()), "a row is written behind the reserved blocks"
        slot = positions % self._rows
        for field, rows in enumerate((k, v)[: self._view.shape[1]]):
            put(self._view[:, field], page, slot, rows)

    def read(self, first: int, count: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Keys and values [count, length, heads, D]; what is behind a request's rows is whatever lies there."""
        at = torch.arange(length, device=self._view.device)
        page = self._pages[first : first + count, at // self._rows].clamp_min(0)
        slot = (at % self._rows).expand(count, -1)
        return [take(self._view[:, field], page, slot).to(dtype) for field in range(self._view.shape[1])]


def is_v2(manager: Any) -> bool:
    return type(manager).__name__.endswith("V2")


def put(pages: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [T, heads, D] into pages [blocks, heads, rows, D]."""
    rows = rows.to(pages.dtype)
    if pages.dtype.itemsize == 1:
        pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
    pages[page, :, slot] = rows


def take(pages: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Rows [..., heads, D] of pages [blocks, heads, rows, D]."""
    if pages.dtype.itemsize == 1:
        return pages.view(torch.uint8)[page, :, slot].view(pages.dtype)
    return pages[page, :, slot]
