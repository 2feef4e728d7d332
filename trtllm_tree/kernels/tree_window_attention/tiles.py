"""How a `tree_window_attention` call over grouped heads is cut up: row tiles, and blocks of keys.

Owns the measured choices. It must not know the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """What one program works on, `max_registers` a thread at most (None: as many as it takes)."""

    block_m: int
    num_warps: int
    max_registers: int | None


def choose_tile(
    batch: int, folded_rows: int, head_dim: int, dtype: torch.dtype, *, one_block: bool = True
) -> Tile:
    """Small tiles fill the GPU at small batch, large ones re-read fewer keys.

    Full-precision products and wide heads need more registers a row, hence lower limits. With 128 registers a
    thread four tiles of 64 rows fit in a multiprocessor, and one computes while others load: on an H200 (B 32,
    64 rows of 32 heads, D 128) 20.5 us, and 23.2 with 160 registers. More than one block of keys took 32.8 us in tiles
    of 128 rows and 33.6 in tiles of 64, although both spill.
    """
    largest = 16 if batch == 1 else 32 if batch < 8 else 64
    if dtype == torch.float32:
        largest = 16
    block_m = max(16, min(largest, 1 << (folded_rows - 1).bit_length()))
    if block_m * head_dim > 64 * 128 or dtype == torch.float32:
        return Tile(block_m, 8, None)
    if block_m < 64 or head_dim <= 64:
        return Tile(block_m, 4, None)
    return Tile(64, 4, 128) if one_block or folded_rows <= 64 else Tile(128, 8, 128)


def key_blocks(num_rows: int, window: int, *, causal_prefix: bool) -> tuple[bool, int]:
    """Whether tail and window fit in one block of keys, and the keys of a block."""
    span = window + (32 * -(-(num_rows - 1) // 32) if causal_prefix else 0)
    return span <= 64, 64 if 32 < span <= 64 else 32
