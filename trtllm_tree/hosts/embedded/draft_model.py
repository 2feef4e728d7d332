"""`ports.DraftModel` over the engine's cache: the EAGLE3 head, its K/V writes and its attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trtllm_tree.attention.cascade import TreeCascade, TreeCascadeRows
from trtllm_tree.attention.rows import TreeAttention
from trtllm_tree.draft.eagle3_head import Eagle3Head
from trtllm_tree.engine.chain_attention import PrefillAttention
from trtllm_tree.engine.kv_cache import KVCache
from trtllm_tree.engine.ports import AttentionBackend, DecodeAttentionFactory, Segment
from trtllm_tree.hosts.embedded.kv import DRAFT_LAYER
from trtllm_tree.kernels.window_slots import window_slots
from trtllm_tree.ports import RoundBatch
from trtllm_tree.tree.lanes import TreeDraftInputs


class EmbeddedDraftModel:
    """The draft head over the draft cache group.

    Args:
        head: the loaded head.
        cache: the engine's cache, with a draft group.
        cascade: tree attention for the lanes.
        decode_attention: attention of the chain's rows.
        num_nodes: N; a round's draft rows stay within two verify windows of the committed length.
    """

    def __init__(
        self,
        head: Eagle3Head,
        cache: KVCache,
        cascade: TreeCascade,
        decode_attention: DecodeAttentionFactory,
        num_nodes: int,
    ) -> None:
        self._head, self._cache, self._cascade, self._num_nodes = head, cache, cascade, num_nodes
        self._decode_attention = decode_attention
        self.hidden_size, self.d2t = head.hidden_size, head.d2t
        self.dtype = next(head.parameters()).dtype

    @property
    def graph_safe(self) -> bool:
        """Whether its attention is."""
        return self._decode_attention.graph_safe

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `ports.DraftModel.fuse`."""
        return self._head.fuse(features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `ports.DraftModel.logits`."""
        return self._head.logits(hidden)

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
        slots = window_slots(
            first, batch.draft_page_table, num_rows=num_rows, page_size=batch.draft_page_size
        )
        attention = self._decode_attention(first + num_rows, num_rows, self._max_kv_len(batch))
        out = self._forward(token_ids, hidden, positions, slots, batch.draft_page_table, attention)
        return out if last_rows is None else out.flatten(0, 1).index_select(0, last_rows).unsqueeze(1)

    def lane_rows(
        self,
        step: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        lanes: TreeDraftInputs,
        batch: RoundBatch,
    ) -> torch.Tensor:
        """See `ports.DraftModel.lane_rows`."""
        size = token_ids.shape[0]
        slots = lanes.slots(step, size)
        rows = TreeCascadeRows(
            prefix_lens=lanes.frontier[:size],
            mask=lanes.lane_mask[:size],
            window=lanes.window,
            max_prefix_len=self._max_kv_len(batch),
        )
        attention = TreeAttention(self._cascade, rows)
        positions = lanes.positions(step, size)
        return self._forward(token_ids, hidden, positions, slots, batch.draft_page_table, attention)

    def prefill_rows(
        self,
        segments: Sequence[Segment],
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        page_table: torch.Tensor,
    ) -> torch.Tensor:
        """Prompt rows [T] of several requests; the segments' rows index into them. Returns [T, H]."""
        attention = PrefillAttention(segments, hidden.device)
        return self._head(token_ids, hidden, positions, self._attend(attention, slots, page_table))

    def _max_kv_len(self, batch: RoundBatch) -> int:
        return batch.max_committed_len + 2 * self._num_nodes

    def _forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        page_table: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        rows = token_ids.numel()
        attend = self._attend(attention, slots.reshape(-1), page_table)
        flat = hidden.reshape(rows, hidden.shape[-1])
        out = self._head(token_ids.reshape(-1), flat, positions.reshape(-1), attend)
        return out.view_as(hidden)

    def _attend(
        self, attention: AttentionBackend, slots: torch.Tensor, page_table: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]:
        """The head's attention call: store the rows' K/V, then attend."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
            k_cache, v_cache = self._cache.write(DRAFT_LAYER, slots, k, v)
            return attention.attend(q, k_cache, v_cache, page_table, scale)

        return attend
