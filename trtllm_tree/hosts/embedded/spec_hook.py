"""The engine's decode hook for speculation: translates its chain words into a `SpecRound`'s and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trtllm_tree.attention.cascade import TreeCascade
from trtllm_tree.attention.rows import TreeAttention, verify_rows
from trtllm_tree.engine.kv_cache import KVCache
from trtllm_tree.engine.ports import (
    AttentionBackend,
    DecodeAttentionFactory,
    DecodeBatch,
    DecodeWindow,
    Segment,
    StepTokens,
)
from trtllm_tree.hosts.embedded.draft_model import EmbeddedDraftModel
from trtllm_tree.hosts.embedded.kv import DRAFT_GROUP
from trtllm_tree.ports import RoundBatch
from trtllm_tree.round import SpecRound, VerifyWindow
from trtllm_tree.sampling.logprobs import TargetLogprobs
from trtllm_tree.tree.reservation import request_extent, round_extent


class SpecDecode:
    """`engine.ports.DecodeHook` over one `SpecRound`.

    Args:
        spec_round: the round.
        draft_model: the drafter over the draft cache, for prompts.
        cache: the engine's cache; its last group is the draft's.
        cascade: tree attention of the target's verify forward.
        decode_attention: attention of a chain's verify forward.
        features: [max_rows, F], the runner's fixed feature buffer.
        logprobs: read the raw logits of kept rows.
    """

    def __init__(
        self,
        spec_round: SpecRound,
        draft_model: EmbeddedDraftModel,
        cache: KVCache,
        cascade: TreeCascade,
        decode_attention: DecodeAttentionFactory,
        features: torch.Tensor,
        logprobs: TargetLogprobs,
    ) -> None:
        self.round, self.window_len = spec_round, spec_round.num_nodes
        self._draft_model, self._cache, self._cascade = draft_model, cache, cascade
        self._decode_attention, self._features = decode_attention, features
        self._logprobs = logprobs
        self._path_len = self.window_len if spec_round.tree is None else spec_round.max_path_len
        self._draft_index = [group.name for group in cache.groups].index(DRAFT_GROUP)
        assert self._draft_index == len(cache.groups) - 1, "the draft group must be the last"
        self._open: tuple[RoundBatch, VerifyWindow] | None = None

    @property
    def graph_safe(self) -> bool:
        """An observer reads values back; a leaf with host-side bounds, on either side, cannot be replayed."""
        attention_safe = self._decode_attention.graph_safe and self._draft_model.graph_safe
        return attention_safe and self.round.observer is None

    def kv_extent(self, committed_len: int, token_limit: int) -> int:
        """See `tree.reservation.round_extent`."""
        return round_extent(committed_len, self.window_len, token_limit)

    def max_kv_extent(self, token_limit: int) -> int:
        """See `tree.reservation.request_extent`."""
        return request_extent(self.window_len, token_limit)

    def reset(self, slot: int) -> None:
        """A new request takes pool slot `slot`."""
        self.round.reset(slot)

    def after_prefill(self, segments: Sequence[Segment]) -> None:
        """Run the drafter over the prompt rows, and draft for the prompts that ended."""
        if not segments:
            return
        device, group = self._features.device, self._cache.groups[self._draft_index]

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=device)

        rows = tensor([row for s in segments for row in range(s.row, s.row + s.length)])
        owner = tensor([index for index, s in enumerate(segments) for _ in s.token_ids])
        positions = tensor([position for s in segments for position in range(s.start, s.end)])
        table = group.page_table[tensor([s.slot for s in segments])]
        pages = table[owner, positions // group.page_size].long()
        packed, last_rows, row = [], [], 0
        for segment in segments:
            packed.append(replace(segment, row=row))
            row += segment.length
            if segment.is_last:
                last_rows.append(row - 1)
        hidden = self._draft_model.prefill_rows(
            packed,
            tensor([token for s in segments for token in s.next_tokens]),
            self._draft_model.fuse(self._features[rows]),
            positions,
            pages * group.page_size + positions % group.page_size,
            table,
        )
        if ended := [s for s in segments if s.is_last]:
            self._start(ended, hidden[tensor(last_rows)])

    def _start(self, segments: Sequence[Segment], last_hidden: torch.Tensor) -> None:
        device = self._features.device
        slots = torch.tensor([s.slot for s in segments], device=device)
        frontier = torch.tensor([s.end for s in segments], dtype=torch.int32, device=device)
        first = torch.tensor([s.next_tokens[-1] for s in segments], dtype=torch.int32, device=device)
        draft_group = self._cache.groups[self._draft_index]
        batch = RoundBatch(
            slots=slots,
            committed_lens=frontier,
            write_slots=slots.new_empty(0, len(segments), self.window_len, dtype=torch.int32),
            draft_page_table=draft_group.page_table[slots],
            draft_page_size=draft_group.page_size,
            max_committed_len=max(s.end for s in segments),
        )
        self.round.start(batch, last_hidden, first, frontier)

    def open_window(self, batch: DecodeBatch) -> DecodeWindow:
        """Open the round's window and choose the attention that its rows need."""
        index = self._draft_index
        round_batch = RoundBatch(
            slots=batch.slots,
            committed_lens=batch.committed_lens,
            write_slots=batch.write_slots[:-1],
            draft_page_table=batch.page_tables[index],
            draft_page_size=self._cache.groups[index].page_size,
            max_committed_len=batch.max_committed_len,
        )
        window = self.round.open_window(round_batch)
        self._open = (round_batch, window)
        return DecodeWindow(window.tokens, window.positions, self._attention(round_batch, window))

    def _attention(self, batch: RoundBatch, window: VerifyWindow) -> AttentionBackend:
        num_nodes, longest = self.window_len, batch.max_committed_len
        if window.tree is None:
            return self._decode_attention(batch.committed_lens + num_nodes, num_nodes, longest + num_nodes)
        return TreeAttention(self._cascade, verify_rows(window.tree, batch.committed_lens, longest))

    def close_window(self, batch: DecodeBatch, window: DecodeWindow, logits: torch.Tensor) -> StepTokens:
        """Verify, compact, draft."""
        assert self._open is not None, "no window is open"
        (round_batch, verify_window), self._open = self._open, None
        self._logprobs.keep(logits)
        accepted = self.round.close_window(round_batch, verify_window, logits)
        logprobs = self._logprobs.take(accepted.path, accepted.predict[:, : self._path_len])
        return StepTokens(accepted.predict, accepted.accept_len, logprobs)
