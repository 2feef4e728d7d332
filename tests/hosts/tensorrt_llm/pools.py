"""KV cache managers of both generations over NaN, as far as `kv.TrtllmKVPool` looks, and what it reads of them by hand.

Layers of one pool lie side by side in every block: [blocks, layers, K and V, Hkv * page_size * D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PAGE = 4


class FakeManager:
    """One manager over pools of layers of equal shape.

    Args:
        shapes: (Hkv, D) of each layer; layers of one shape share a pool.
        num_blocks: of every pool.
        generation: 1 gives strided views of blocks, 2 contiguous ones that overlap the layers behind.
        kv_factor: 1 for latent rows.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        *,
        num_blocks: int,
        generation: int,
        dtype: torch.dtype = torch.float32,
        max_blocks: int = 6,
        kv_factor: int = 2,
        device: str = "cpu",
        page: int = PAGE,
    ) -> None:
        self.tokens_per_block, self.max_blocks_per_seq = page, max_blocks
        self.shapes, self.generation, self.kv_factor = list(shapes), generation, kv_factor
        self.layer_offsets = {index: index for index in range(len(shapes))}
        self.dtype: object = "DataType.HALF"
        kinds = list(dict.fromkeys(shapes))
        pools = [kinds.index(shape) for shape in shapes]
        places = [pools[:index].count(pool) for index, pool in enumerate(pools)]
        self.layers_in_pool = [pools.count(pool) for pool in range(len(kinds))]
        self.kv_cache_pool_mapping = torch.tensor(list(zip(pools, places, strict=True)), dtype=torch.int32)
        self.num_pools, self.num_blocks = len(kinds), num_blocks
        self.memory = [
            torch.full(
                (num_blocks, layers, kv_factor, heads * page * dim),
                float("nan"),
                dtype=torch.float32,
                device=device,
            ).to(dtype)
            for layers, (heads, dim) in zip(self.layers_in_pool, kinds, strict=True)
        ]

    def get_buffers(self, layer_idx: int, kv_layout: str = "NHD") -> torch.Tensor:
        assert kv_layout == "HND", "the leaves read pages by head"
        local = self.layer_offsets[layer_idx]
        (pool, place), (heads, dim) = self.kv_cache_pool_mapping[local].tolist(), self.shapes[local]
        memory = self.memory[pool]
        if self.generation == 1:
            return memory[:, place].view(-1, self.kv_factor, heads, self.tokens_per_block, dim)
        behind = memory.view(-1, heads * self.tokens_per_block * dim)[place * self.kv_factor :]
        pages = behind.shape[0] // self.kv_factor
        return behind[: pages * self.kv_factor].view(pages, self.kv_factor, heads, self.tokens_per_block, dim)

    def rows(self, layer_idx: int, block: int, field: int) -> torch.Tensor:
        """Memory [Hkv, self.tokens_per_block, D] of a block, by hand."""
        local = self.layer_offsets[layer_idx]
        pool, place = self.kv_cache_pool_mapping[local].tolist()
        return self.memory[pool][block, place, field].view(
            self.shapes[local][0], self.tokens_per_block, self.shapes[local][1]
        )

    def offsets(self, blocks: Sequence[Sequence[int]], *, behind: int = -1) -> torch.Tensor:
        """Block offsets [pools, sequences, 2, max_blocks] of sequences' blocks, the same in every pool."""
        device = self.memory[0].device
        table = torch.full(
            (self.num_pools, len(blocks), 2, self.max_blocks_per_seq),
            behind,
            dtype=torch.int32,
            device=device,
        )
        for pool, layers in enumerate(self.layers_in_pool):
            for row, numbers in enumerate(blocks):
                for index, block in enumerate(numbers):
                    for field in range(2):
                        table[pool, row, field, index] = (
                            block * layers * self.kv_factor + field % self.kv_factor
                        )
        return table


def row_of(manager: Any, layer: int, blocks: Sequence[int], position: int, field: int) -> torch.Tensor:
    """The row [Hkv, D] of a position."""
    return manager.rows(layer, blocks[position // manager.tokens_per_block], field)[
        :, position % manager.tokens_per_block
    ]
