"""How one step's requests lie in TensorRT-LLM's batch, and the same requests as a round's: slots, lengths, pages.

Must not know what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trtllm_tree.hosts.tensorrt_llm.worker_parts import WorkerParts
from trtllm_tree.ports import RoundBatch

# Requests of a batch: consecutive ones, or those at int64 [B].
Requests = slice | torch.Tensor


@dataclass(frozen=True)
class StepBatch:
    """`num_contexts` prompts, of `num_context_rows` rows in all, and behind them `size` requests of N rows each."""

    num_contexts: int
    num_context_rows: int
    size: int

    @classmethod
    def of(cls, attn_metadata: Any) -> StepBatch:
        """The batch that this metadata is about."""
        contexts, rows = int(attn_metadata.num_contexts), int(attn_metadata.num_ctx_tokens)
        return cls(contexts, rows, int(attn_metadata.num_seqs) - contexts)

    @property
    def total(self) -> int:
        """Requests of both kinds."""
        return self.num_contexts + self.size

    @property
    def requests(self) -> slice:
        """The generation requests."""
        return slice(self.num_contexts, self.total)

    def rows(self, num_nodes: int) -> slice:
        """Their rows, N = `num_nodes` each."""
        return slice(self.num_context_rows, self.num_context_rows + self.size * num_nodes)


def target_tables(parts: WorkerParts, attn_metadata: Any, requests: Requests) -> torch.Tensor:
    """Pages of the target's cache, int32 [G, B, max_pages]."""
    capacity = _capacity(parts, attn_metadata, requests)
    return parts.pool.load_tables(attn_metadata.kv_cache_block_offsets, requests, capacity)


def round_batch(
    parts: WorkerParts,
    attn_metadata: Any,
    requests: Requests,
    committed_lens: torch.Tensor,
    write_slots: torch.Tensor,
) -> RoundBatch:
    """These requests at int32 [B] committed tokens; int32 [G, B, N] slots of the window behind them."""
    return RoundBatch(
        slots=parts.storage.all_ids_buf[requests],
        committed_lens=committed_lens,
        write_slots=write_slots,
        draft_page_table=_draft_table(parts, attn_metadata, requests),
        draft_page_size=parts.draft_pool.page_size,
        max_committed_len=parts.pool.max_pages * parts.pool.page_size,
    )


def _draft_table(parts: WorkerParts, attn_metadata: Any, requests: Requests) -> torch.Tensor:
    """Pages of the head's cache, int32 [B, max_pages]."""
    separate = parts.managers.draft_kv is not None
    offsets = attn_metadata.draft_kv_cache_block_offsets if separate else attn_metadata.kv_cache_block_offsets
    capacity = _capacity(parts, attn_metadata, requests)
    return parts.draft_pool.load_tables(offsets, requests, capacity)[0]


def _capacity(parts: WorkerParts, attn_metadata: Any, requests: Requests) -> torch.Tensor:
    """Rows that are surely allocated to each request, window included."""
    kv_lens = attn_metadata.kv_lens_cuda[requests]
    extra = getattr(attn_metadata.kv_cache_params, "num_extra_kv_tokens", None) or 0
    return torch.add(kv_lens, extra, out=parts.buffers.capacity[: kv_lens.shape[0]])
