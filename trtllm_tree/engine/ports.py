"""What the engine asks of an attention backend and of whoever owns its decode step. Chain words only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trtllm_tree.config.guided_decoding import GuidedDecodingParams
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.errors import Problem


class AttentionBackend(Protocol):
    """Attention for the rows of one forward, whose K/V are already in the cache."""

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        scale: float,
        *,
        value_dim: int | None = None,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, Hq, D] over caches [num_pages, Hkv, page_size, D]; returns [T, Hq, D].

        `page_table` int32 [B, max_pages] is that of the layer's cache group, one row a request of the forward.
        `v_cache=None` means latent rows, whose leading `value_dim` channels (Dv) are their values: returns [T, Hq, Dv].
        A row at position p sees its keys at positions above p - `sliding_window`, or all of them. `sinks` float32 [Hq]
        joins every softmax of a head as one more score (a natural logarithm) whose value is 0.
        """
        ...


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one target forward.

    Attributes:
        token_ids, positions: int64 [T].
        write_slots: per cache group int32 [T], where each row's K/V go.
        page_tables: per cache group int32 [B, max_pages].
        attention: attends these rows.
        logit_rows: int64 [M], rows whose logits are wanted; None for all.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: tuple[torch.Tensor, ...]
    page_tables: tuple[torch.Tensor, ...]
    attention: AttentionBackend
    logit_rows: torch.Tensor | None = None


@dataclass(frozen=True)
class Segment:
    """Rows [row, row + length) of a prefill forward: one request's prompt positions from `start` on.

    Attributes:
        slot: the request's pool slot.
        token_ids: the rows' tokens.
        next_tokens: each row's successor; the last row of the prompt's last chunk is followed by the token
            that prefill predicted (-1 until it is known).
        is_last: whether this chunk ends the prompt.
    """

    slot: int
    row: int
    start: int
    token_ids: tuple[int, ...]
    next_tokens: tuple[int, ...]
    is_last: bool

    @property
    def length(self) -> int:
        """Rows of the segment."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Prompt position behind the segment."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class DecodeBatch:
    """The requests of one decode step, pad rows last.

    Attributes:
        slots: int64 [B], pool slots.
        committed_lens: int32 [B], tokens in the cache.
        page_tables: per cache group int32 [B, max_pages].
        write_slots: int32 [G, B, N], per cache group the slots of the next N positions.
        max_committed_len: host-side maximum of `committed_lens`.
    """

    slots: torch.Tensor
    committed_lens: torch.Tensor
    page_tables: tuple[torch.Tensor, ...]
    write_slots: torch.Tensor
    max_committed_len: int


@dataclass(frozen=True)
class DecodeWindow:
    """What the hook wants forwarded: tokens and positions [B, N], attention over them."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBackend


# Of tokens behind D kept rows of B requests: values float32 [B, D, 1 + n], the token's first and then the n largest;
# their ids int64 alike; the tokens' ranks int64 [B, D].
RowLogprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StepTokens:
    """What a decode step produced: tokens int32 [B, N] packed to the front, and how many, int32 [B].

    A kept token of -1 says that the target's logits were not numbers. `logprobs` are the tokens', if some were planned.
    """

    tokens: torch.Tensor
    num_tokens: torch.Tensor
    logprobs: RowLogprobs | None = None


class TokenDraws(Protocol):
    """Chooses the target's tokens, each request's by its own sampling parameters.

    Attributes:
        kind: what the next draws do, as planned. A captured step serves one value of it.
    """

    @property
    def kind(self) -> Hashable:
        """See above."""
        ...

    def plan(self, slots: Sequence[int]) -> None:
        """The next draws are for these pool slots, and for pad rows."""
        ...

    def reset(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A request with these parameters takes pool slot `slot`."""
        ...

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens int32 [B*R] behind the rows of `logits` [B*R, V]; -1 where a logit is NaN.

        `slots` int64 [B] and `positions` int64 [B, R] say whose the rows are and where they lie. A token depends on
        its row's logits, its request's parameters and seed, and its position. The next draw overwrites them.
        """
        ...


class LogitEditor(Protocol):
    """Applies each request's penalties, biases and bans to its logits, before anything is chosen from them.

    Attributes:
        kind: what the next `apply` does, as planned. A captured step serves one value of it.
    """

    @property
    def kind(self) -> Hashable:
        """See above."""
        ...

    def plan(self, slots: Sequence[int]) -> None:
        """The next rows are of these pool slots, and pad rows."""
        ...

    def reset(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        stop_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        """A request takes pool slot `slot`; `stop_ids` may end it, the sequences `bad_words` are banned."""
        ...

    def apply(
        self, logits: torch.Tensor, slots: torch.Tensor, tokens: None, tree: None, positions: torch.Tensor
    ) -> None:
        """Edit `logits` [B, V] in place: one row for each of `slots` int64 [B], at `positions` int64 [B, 1]."""
        ...

    def commit(self, kept: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Output tokens were kept by the requests in these pool slots, which go on."""
        ...


class OutputGrammars(Protocol):
    """Keeps each request's output within its grammar, by what its logits may choose. Works on the host."""

    def check(self, guided: GuidedDecodingParams) -> list[Problem]:
        """Why this grammar cannot be followed, or nothing."""
        ...

    def reset(self, slot: int, guided: GuidedDecodingParams | None) -> None:
        """A request takes pool slot `slot`, after the edits were told; its grammar, if it has one, passed `check`."""
        ...

    def fill(self, slots: Sequence[int], num_rows: int) -> None:
        """Let the edits of the next `num_rows` rows of each of these slots know what the grammars allow there."""
        ...

    def advance(self, slot: int, tokens: Sequence[int]) -> int:
        """Tokens were chosen; returns how many of them, from the first on, the grammar of `slot` allows."""
        ...

    def num_pruned(self, slot: int) -> int:
        """Drafted tokens that the grammar of `slot` forbade so far."""
        ...


class LogprobReader(Protocol):
    """Reads log-probabilities off the raw logits of kept rows.

    Attributes:
        kind: what the next `take` returns, as planned. A captured step serves one value of it.
    """

    @property
    def kind(self) -> Hashable:
        """See above."""
        ...

    def plan(self, slots: Sequence[int]) -> None:
        """The next rows are of these pool slots, and pad rows."""
        ...

    def reset(self, slot: int, num_top: int | None) -> None:
        """A request that wants `num_top` likeliest tokens, or no log-probabilities at all, takes pool slot `slot`."""
        ...

    def keep(self, logits: torch.Tensor) -> None:
        """Remember `logits` [B*R, V] before they are edited."""
        ...

    def take(self, path: torch.Tensor | None, tokens: torch.Tensor) -> RowLogprobs | None:
        """What was planned, of `tokens` int32 [B, D] behind the kept rows: the first D, or those that a path names."""
        ...

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> RowLogprobs:
        """Of `tokens` int64 [M] behind the rows `logits` [M, V], without D."""
        ...


class DecodeAttentionFactory(Protocol):
    """Makes the attention of `num_rows` consecutive rows a request.

    Attributes:
        graph_safe: whether `max_kv_len` is not looked at.
    """

    graph_safe: bool

    def __call__(self, kv_lens: torch.Tensor, num_rows: int, max_kv_len: int) -> AttentionBackend:
        """`kv_lens` int32 [B] keys including the rows' own, and their host-side bound."""
        ...


class DecodeHook(Protocol):
    """Owns what happens in a decode step around the target forward.

    Attributes:
        window_len: rows a request contributes.
        graph_safe: whether a step neither reads values back from the device nor depends on host-side lengths, so
            that a captured one can be replayed.
    """

    window_len: int

    @property
    def graph_safe(self) -> bool:
        """See above."""
        ...

    def kv_extent(self, committed_len: int, token_limit: int) -> int:
        """KV tokens to have allocated before a step that starts at `committed_len`."""
        ...

    def max_kv_extent(self, token_limit: int) -> int:
        """The largest `kv_extent` a request with this limit can need."""
        ...

    def reset(self, slot: int) -> None:
        """A new request takes pool slot `slot`."""
        ...

    def after_prefill(self, segments: Sequence[Segment]) -> None:
        """A prefill forward ran; these segments' requests go on. Their KV extent is reserved."""
        ...

    def open_window(self, batch: DecodeBatch) -> DecodeWindow:
        """The rows to forward."""
        ...

    def close_window(self, batch: DecodeBatch, window: DecodeWindow, logits: torch.Tensor) -> StepTokens:
        """Turn `logits` [B*N, V] into tokens."""
        ...
