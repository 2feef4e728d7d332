"""`ports.DraftModel` over the engine's cache: which rows a draft forward has, where they are stored, what they see.

What the forward computes is a `DraftSide`'s business: an EAGLE3 head's, or the target's MTP layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trtllm_tree.attention.cascade import TreeCascade, TreeCascadeRows
from trtllm_tree.attention.rows import TreeAttention
from trtllm_tree.engine.chain_attention import PrefillAttention
from trtllm_tree.engine.kv_cache import KVCache, LayerSpec
from trtllm_tree.engine.model_runner import ModelRunner
from trtllm_tree.engine.ports import AttentionBackend, DecodeAttentionFactory, ForwardBatch, Segment
from trtllm_tree.hosts.embedded.kv import DRAFT_GROUP
from trtllm_tree.kernels.window_slots import window_slots
from trtllm_tree.ports import RoundBatch
from trtllm_tree.tree.lanes import TreeDraftInputs


class DraftSide(Protocol):
    """One draft layer, run again for every step.

    Attributes:
        hidden_size: H.
        vocab_size: Vd, rows of its logits.
        d2t: from its vocabulary to the target's; None where they are one.
        graph_safe: whether a forward never waits for the device.
    """

    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    d2t: torch.Tensor | None
    graph_safe: bool

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `ports.DraftModel.fuse`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `ports.DraftModel.logits`."""
        ...

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Hidden rows [T, H] beside the batch's tokens, to hidden rows [T, H]; stores the rows' K/V first.

        The draft group is the cache's only one, and the only one that the batch speaks of.
        """
        ...


@dataclass(frozen=True)
class DraftPlan:
    """What will draft, as far as it is known before the target is loaded.

    Attributes:
        num_heads, layer: query heads and cache shape of the draft layer.
        load: makes the draft side for a loaded target, and the buffer [max_rows, F] that every later target forward
            fills with the features of its first T rows. Takes the target and max_rows.
    """

    num_heads: int
    layer: LayerSpec
    load: Callable[[ModelRunner, int], tuple[DraftSide, torch.Tensor]]


class EmbeddedDraftModel:
    """A draft side over the draft cache group.

    Args:
        side: what a forward computes.
        cache: the engine's cache, with a draft group.
        cascade: tree attention for the lanes.
        decode_attention: attention of the chain's rows.
        num_nodes: N; a round's draft rows stay within two verify windows of the committed length.
    """

    def __init__(
        self,
        side: DraftSide,
        cache: KVCache,
        cascade: TreeCascade,
        decode_attention: DecodeAttentionFactory,
        num_nodes: int,
    ) -> None:
        self._side, self._cascade, self._num_nodes = side, cascade, num_nodes
        self._cache = KVCache([group for group in cache.groups if group.name == DRAFT_GROUP])
        self._decode_attention = decode_attention
        self.hidden_size, self.d2t, self.dtype = side.hidden_size, side.d2t, side.dtype

    @property
    def graph_safe(self) -> bool:
        """Whether its attention and its layer are."""
        return self._decode_attention.graph_safe and self._side.graph_safe

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `ports.DraftModel.fuse`."""
        return self._side.fuse(features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `ports.DraftModel.logits`."""
        return self._side.logits(hidden)

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
        return self._forward(token_ids, hidden, positions, slots, page_table, attention)

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
        """Rows of any shape [...], `hidden` [..., H]; returns [..., H]."""
        batch = ForwardBatch(
            token_ids=token_ids.reshape(-1),
            positions=positions.reshape(-1),
            write_slots=(slots.reshape(-1),),
            page_tables=(page_table,),
            attention=attention,
        )
        return self._side.forward(hidden.reshape(-1, hidden.shape[-1]), batch, self._cache).view_as(hidden)
