"""Blocks of one KV manager: who owns which, and how many rows are reserved for each request."""

from __future__ import annotations


class BlockLedger:
    """Rows are counted in tokens; a request owns as many blocks as its rows fill."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        # Popped from the end: low ids first, and a block that was just freed comes back first.
        self.free = list(range(num_blocks))[::-1]
        self.rows: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}

    def grow(self, request_id: int, num_rows: int) -> list[int]:
        """Reserve more rows; returns the blocks that were taken for them."""
        self.rows[request_id] = self.rows.get(request_id, 0) + num_rows
        owned = self.blocks.setdefault(request_id, [])
        fresh = []
        while len(owned) * self.tokens_per_block < self.rows[request_id]:
            assert self.free, "the KV cache has no block left"
            fresh.append(self.free.pop())
            owned.append(fresh[-1])
        return fresh

    def rewind(self, request_id: int, num_rows: int) -> None:
        """Give rows back, and blocks that they leave empty."""
        assert 0 <= num_rows < self.rows[request_id], (
            f"{num_rows} of {self.rows[request_id]} rows cannot be rewound"
        )
        self.rows[request_id] -= num_rows
        owned = self.blocks[request_id]
        while (len(owned) - 1) * self.tokens_per_block >= self.rows[request_id]:
            self.free.append(owned.pop())

    def release(self, request_id: int) -> None:
        """The request is gone."""
        del self.rows[request_id]
        self.free.extend(self.blocks.pop(request_id))
