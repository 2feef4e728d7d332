"""`ports.DraftModel` over a drafter's modules, its KV cache and TensorRT-LLM's attention metadata.

A draft forward is a forward of some requests with R rows each, whatever the step's batch is: the metadata is told so
for the time being, and a `TreeStep` says where the rows lie and what they see. Prompts go through TensorRT-LLM's own
context attention. Must not know how trees grow, how attention runs, nor whose modules draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from trtllm_tree.attention.cascade import TreeCascadeRows
from trtllm_tree.attention.rows import ChainRows
from trtllm_tree.hosts.tensorrt_llm.draft_heads import DraftHead
from trtllm_tree.hosts.tensorrt_llm.kv import TrtllmKVPool, slots_of
from trtllm_tree.hosts.tensorrt_llm.step import TreeStep, publish, published
from trtllm_tree.ports import RoundBatch
from trtllm_tree.tree.lanes import TreeDraftInputs

# By request, what TensorRT-LLM's attention reads of a batch.
_VIEWS = (
    "kv_lens_cuda_runtime",
    "kv_lens_runtime",
    "prompt_lens_cuda_runtime",
    "prompt_lens_cpu_runtime",
    "host_request_types_runtime",
)
_BITS = 64


class TrtllmDraftModel:
    """The drafter of a one-model worker.

    Args:
        head: its modules.
        pool: the cache of its layers, of one group.
        max_batch: largest B of a draft forward.
        num_nodes: N.
    """

    def __init__(self, head: DraftHead, pool: TrtllmKVPool, *, max_batch: int, num_nodes: int) -> None:
        assert pool.num_groups == 1, "the head's layers lie in several pools"
        assert num_nodes >= 1, "no nodes"
        self._head, self._pool, self._max_batch = head, pool, max_batch
        self.hidden_size, self.dtype, self.d2t = head.hidden_size, head.dtype, head.d2t
        self.draft_vocab_size = head.draft_vocab_size
        self._bound: tuple[Any, Any] | None = None
        self._step_batch: dict[str, Any] = {}
        self._row_counts: dict[int, torch.Tensor] = {}
        self._chains = ChainRows(pool.device)
        self._lane_window: _LaneWindow | None = None

    @contextmanager
    def bind(
        self,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_kv_cache_context: AbstractContextManager[Any] | None = None,
    ) -> Iterator[None]:
        """The draft forwards of one worker call, which leave the metadata as it was.

        Args:
            draft_kv_cache_context: the worker's, which puts the head's cache in the place of the target's; None where
                they share one.

        Raises:
            HostError: the target's forward before it left a step that some of its layers did not attend.
        """
        if (step := published(attn_metadata)) is not None:
            step.require_attended()
        names = ("_seq_lens", "_seq_lens_cuda", "_num_contexts", "use_spec_decoding", *_VIEWS)
        saved = {name: getattr(attn_metadata, name) for name in names}
        self._bound, self._step_batch = (attn_metadata, spec_metadata), saved
        try:
            with draft_kv_cache_context or nullcontext():
                yield
        finally:
            self._bound, self._step_batch = None, {}
            for name, value in saved.items():
                setattr(attn_metadata, name, value)
            attn_metadata.on_update()
            publish(attn_metadata, None)

    def features(self, hidden_states: torch.Tensor, spec_metadata: Any) -> torch.Tensor:
        """See `DraftHead.features`."""
        return self._head.features(hidden_states, spec_metadata)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `ports.DraftModel.fuse`."""
        rows = self._head.fuse(features.reshape(-1, features.shape[-1]))
        return rows.view(*features.shape[:-1], rows.shape[-1])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `ports.DraftModel.logits`."""
        return self._head.logits(hidden, self._metadata()[0])

    def chain_rows(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: RoundBatch,
        last_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `ports.DraftModel.chain_rows`."""
        num_rows = token_ids.shape[1]
        first = positions[:, 0].int()
        rows = self._chains.behind(first, num_rows, batch.max_committed_len)
        slots = slots_of(positions.int(), batch.draft_page_table, batch.draft_page_size)
        out = self._forward("chain", token_ids, hidden, positions, rows, slots, batch)
        return out if last_rows is None else out.flatten(0, 1).index_select(0, last_rows).unsqueeze(1)

    def lane_rows(
        self,
        step: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        lanes: TreeDraftInputs,
        batch: RoundBatch,
    ) -> torch.Tensor:
        """See `ports.DraftModel.lane_rows`. A lane without a page stores nothing, and no lane looks for it there."""
        size, topk = token_ids.shape
        frontier = lanes.frontier[:size]
        if self._lane_window is None:
            self._lane_window = _LaneWindow(lanes, self._max_batch, self._pool.device)
        if step == 1:
            self._lane_window.open(frontier, batch)
        rows = TreeCascadeRows(
            prefix_lens=frontier,
            mask=lanes.lane_mask[:size] & self._lane_window.columns[:size],
            window=lanes.window,
            max_prefix_len=batch.max_committed_len,
        )
        positions = lanes.positions(step, size).contiguous()
        slots = self._lane_window.slots[:size, (step - 1) * topk : step * topk]
        return self._forward("lanes", token_ids, hidden, positions, rows, slots, batch)

    def prefill_rows(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The batch's context rows, by TensorRT-LLM's own attention.

        Args:
            token_ids: int32 [T].
            hidden: [T, H].
            positions: int64 [T].

        Returns:
            [T, H].
        """
        metadata, _ = self._metadata()
        contexts = self._step_batch["_num_contexts"]
        for name in ("_seq_lens", "_seq_lens_cuda", *_VIEWS):
            setattr(metadata, name, self._step_batch[name][:contexts])
        metadata.use_spec_decoding = False
        metadata.num_contexts = contexts
        publish(metadata, None)
        return self._run(token_ids, hidden, positions)

    def _forward(
        self,
        mode: Literal["lanes", "chain"],
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rows: TreeCascadeRows,
        slots: torch.Tensor,
        batch: RoundBatch,
    ) -> torch.Tensor:
        """R rows of each of B requests: hidden [B, R, H] to what the head hands on, [B, R, H]."""
        (size, num_rows), (metadata, _) = token_ids.shape, self._metadata()
        metadata._seq_lens = torch.full((size,), num_rows, dtype=torch.int32)
        metadata._seq_lens_cuda = self._rows_on_device(num_rows)[:size]
        metadata.num_contexts = 0
        step = TreeStep(
            mode=mode,
            pool=self._pool,
            rows=rows,
            positions=positions,
            write_slots=slots.unsqueeze(0),
            page_tables=batch.draft_page_table.unsqueeze(0),
        )
        publish(metadata, step)
        flat = hidden.reshape(-1, hidden.shape[-1])
        out = self._run(token_ids.reshape(-1), flat, positions.reshape(-1))
        step.require_attended()
        return out.view(size, num_rows, -1)

    def _run(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # A module may change the positions in place.
        positions = positions.to(torch.int32, copy=True)
        return self._head.run(token_ids, positions, hidden, *self._metadata())

    def _metadata(self) -> tuple[Any, Any]:
        assert self._bound is not None, "a draft forward outside of a worker call"
        return self._bound

    def _rows_on_device(self, num_rows: int) -> torch.Tensor:
        if num_rows not in self._row_counts:
            self._row_counts[num_rows] = torch.full(
                (self._max_batch,), num_rows, dtype=torch.int32, device=self._pool.device
            )
        return self._row_counts[num_rows]


class _LaneWindow:
    """Where the lanes of a round write, at fixed addresses.

    Attributes:
        slots: int32 [max_batch, W].
        columns: int64 [max_batch, 1, words], bit j: column j has a slot.
    """

    def __init__(self, lanes: TreeDraftInputs, max_batch: int, device: torch.device) -> None:
        width = lanes.window
        self.slots = torch.zeros(max_batch, width, dtype=torch.int32, device=device)
        self.columns = torch.zeros_like(lanes.lane_mask[:max_batch, :1])
        self._index = torch.arange(width, dtype=torch.int32, device=device)
        self._weights = torch.ones(width, dtype=torch.int64, device=device) << (self._index.long() % _BITS)

    def open(self, frontier: torch.Tensor, batch: RoundBatch) -> None:
        """Begin a round whose lanes stand at `frontier` int32 [B]."""
        size = frontier.shape[0]
        slots, columns = self.slots[:size], self.columns[:size, 0]
        positions = frontier.unsqueeze(1) + self._index
        slots.copy_(slots_of(positions, batch.draft_page_table, batch.draft_page_size))
        bits = (slots >= 0) * self._weights
        for word in range(columns.shape[1]):
            torch.sum(bits[:, word * _BITS : (word + 1) * _BITS], dim=1, out=columns[:, word])
