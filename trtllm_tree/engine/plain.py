"""Plain decoding: one row a request, one token a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_tree.engine.ports import (
    DecodeAttentionFactory,
    DecodeBatch,
    DecodeWindow,
    LogitEditor,
    LogprobReader,
    Segment,
    StepTokens,
    TokenDraws,
)


class PlainDecode:
    """The `DecodeHook` without speculation.

    Args:
        num_slots: pool slots, the pad slot included.
        device: where its one map lives.
        attention: makes the decode rows' attention.
        draws: choose the tokens.
        edits: change the logits before.
        logprobs: read the raw ones.
    """

    window_len = 1

    def __init__(
        self,
        num_slots: int,
        device: torch.device,
        attention: DecodeAttentionFactory,
        draws: TokenDraws,
        edits: LogitEditor,
        logprobs: LogprobReader,
    ) -> None:
        self._attention, self._draws, self._edits = attention, draws, edits
        self._logprobs = logprobs
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)

    @property
    def graph_safe(self) -> bool:
        """Whether its attention is."""
        return self._attention.graph_safe

    def kv_extent(self, committed_len: int, token_limit: int) -> int:
        """The next token's row."""
        return committed_len + 1

    def max_kv_extent(self, token_limit: int) -> int:
        """Every token but the last, which is never forwarded."""
        return token_limit

    def reset(self, slot: int) -> None:
        """A new request's last token is not known yet."""
        self._last_tokens[slot] = 0

    def after_prefill(self, segments: Sequence[Segment]) -> None:
        """Remember the first tokens."""
        for segment in segments:
            if segment.is_last:
                self._last_tokens[segment.slot] = segment.next_tokens[-1]

    def open_window(self, batch: DecodeBatch) -> DecodeWindow:
        """The last token of every request."""
        return DecodeWindow(
            token_ids=self._last_tokens[batch.slots].unsqueeze(1),
            positions=batch.committed_lens.long().unsqueeze(1),
            attention=self._attention(batch.committed_lens + 1, 1, batch.max_committed_len + 1),
        )

    def close_window(self, batch: DecodeBatch, window: DecodeWindow, logits: torch.Tensor) -> StepTokens:
        """The draw behind every request's last token; -1 where a logit is NaN."""
        self._logprobs.keep(logits)
        self._edits.apply(logits, batch.slots, None, None, window.positions)
        tokens = self._draws.draw(logits, batch.slots, window.positions)
        self._last_tokens[batch.slots] = tokens
        column = tokens.unsqueeze(1)
        return StepTokens(column, torch.ones_like(tokens), self._logprobs.take(None, column))
