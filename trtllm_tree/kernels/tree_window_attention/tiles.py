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


def choose_tile(batch: int, folded_rows: int, head_dim: int, dtype: torch.dtype, *, rest_n: int = 0) -> Tile:
    """Small tiles fill the GPU at small batch, large ones re-read fewer keys; `rest_n` as of `key_blocks`.

    Full-precision products and wide heads need more registers a row, hence lower limits. With 128 registers a
    thread four tiles of 64 rows fit in a multiprocessor, and one computes while others load: on an H200 (B 32,
    64 rows of 32 heads, D 128) 20.5 us, and 23.2 with 160 registers. Further blocks of 32 keys spill least in tiles
    of 128 rows, of 16 keys in tiles of 64 (29.9 us; 34.5 in tiles of 128).
    """
    largest = 16 if batch == 1 else 32 if batch < 8 else 64
    if dtype == torch.float32:
        largest = 16
    block_m = max(16, min(largest, 1 << (folded_rows - 1).bit_length()))
    if block_m * head_dim > 64 * 128 or dtype == torch.float32:
        return Tile(block_m, 8, None)
    if block_m < 64 or head_dim <= 64:
        return Tile(block_m, 4, None)
    return Tile(128, 8, 128) if rest_n > 16 and folded_rows > 64 else Tile(64, 4, 128)


def key_blocks(num_rows: int, window: int, *, causal_prefix: bool) -> tuple[int, int]:
    """Keys of the first block, and of each further one; 0: all keys lie in the first.

    A tile of rows sees a tail that shrinks by a column a row, and a window that grows by one: with 64 rows, tail and
    window of 16 rows are 79 columns, one block of 64 and one of 16.
    """
    span = window + (32 * -(-(num_rows - 1) // 32) if causal_prefix else 0)
    if span <= 64:
        return 64 if span > 32 else 32, 0
    return 64, 16 if causal_prefix and window <= 64 else 32
