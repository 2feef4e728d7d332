"""How a `tree_decode` call is cut up: row and key tiles, splits, and the workspace they need.

Owns the measured tables. Everything follows from shapes, dtypes and the GPU, never from lengths, so that a
captured call serves any lengths. It must not know the kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# A row of the workspace is the accumulator, the running max, the sum, and padding to 16 bytes.
ROW_EXTRA = 4
# Multiprocessors assumed where there is no GPU (the interpreter): enough to make splits.
_INTERPRETED_PROCESSORS = 8


@dataclass(frozen=True)
class Tile:
    """What one CTA works on: BLOCK_M folded rows against `block_n` keys an iteration."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int


def choose_tile(folded_rows: int, head_dim: int, itemsize: int) -> Tile:
    """The tile for R * group rows per KV head; `itemsize` is that of a cache element in bytes.

    Measured on an H200 (Hq 32, Hkv 8, D 128, page 64, B 8, 32k keys; us).
    4 rows: (16, 64) with 2 warps and 3 CTAs 242, with 4 warps and 2 CTAs 257.
    64 rows: (64, 64) with 5 stages and 1 CTA 256, with 2 stages and 2 CTAs 261, (64, 128) 282, (32, 64) 476;
    FP8: (64, 128) with 2 CTAs 249, (64, 64) 296, specialised 257; FP8 query: 189, 231, 235.
    128 rows: specialised 263, (128, 128) 349, (64, 64) 388, (128, 64) 453; FP8: specialised 261,
    (64, 128) with 2 CTAs 473, (128, 128) 493; FP8 query: 237, 352, 382.
    """
    if itemsize == 4:
        return Tile(16, 32, 8, 1, 1)
    if head_dim > 128:
        return Tile(16, 64, 4, 2, 1) if folded_rows <= 16 else Tile(64, 64, 8, 2, 1)
    if folded_rows <= 16:
        return Tile(16, 64, 2, 3, 3)
    if folded_rows <= 64:
        return Tile(64, 128, 4, 2, 2) if itemsize == 1 else Tile(64, 64, 4, 5, 1)
    return Tile(128, 128, 8, 2, 1)


def choose_splits(num_programs: int, num_slots: int) -> int:
    """Splits of each request's keys for `num_programs` (request, KV head, row tile) triples.

    Takes the number that leaves the fewest slots idle, a wave more counting 5 %: fewer splits are less to
    merge, and more waves were measured slower on an H200.
    """
    if num_programs >= 2 * num_slots:
        return 1
    largest = max(1, -(-2 * num_slots // num_programs))
    return min(range(1, largest + 1), key=lambda s: _span(num_programs * s, num_slots) / s)


def _span(num_ctas: int, num_slots: int) -> float:
    waves = -(-num_ctas // num_slots)
    return waves * (1 + 0.05 * waves)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def fits_tma(cache: torch.Tensor, block_n: int) -> bool:
    """Whether a box of one page and head can be copied by TMA, one or two of them making a key block."""
    page_size, itemsize = cache.shape[2], cache.element_size()
    aligned = cache.data_ptr() % 16 == 0 and all(s * itemsize % 16 == 0 for s in cache.stride()[:3])
    return aligned and block_n in (page_size, 2 * page_size) and page_size <= 256


def plan(q: torch.Tensor, k_cache: torch.Tensor) -> tuple[Tile, int]:
    """Tile and number of splits of one call."""
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    folded = num_rows * num_heads // num_kv_heads
    tile = choose_tile(folded, head_dim, k_cache.element_size())
    num_programs = batch * num_kv_heads * -(-folded // tile.block_m)
    return tile, choose_splits(num_programs, processors(q.device) * tile.ctas_per_sm)


def partials_shape(q: torch.Tensor, k_cache: torch.Tensor) -> tuple[int, int, int]:
    """Shape of the workspace, see the op."""
    batch, num_rows, num_heads, head_dim = q.shape
    _, num_splits = plan(q, k_cache)
    if num_splits == 1:
        return (0, 0, 0)
    return (num_splits, batch * num_rows * num_heads, head_dim + ROW_EXTRA)
