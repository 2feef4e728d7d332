"""What a request's own rules do to the target's logits, node by node, before any backend looks at them.

A row's edit depends on the tokens before the one that it predicts: the committed ones, which every slot keeps, and the
row's ancestors in the window. So a node honours what plain decoding honours at the same place. The order is vLLM's:
logit bias and banned ids, penalties; then bad words, and last the bitmask of a grammar. Must not know how tokens
are chosen from the edited logits.

Legend: B requests, R rows of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_tree.config.sampling import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_EDITED_IDS,
    SamplingParams,
)
from trtllm_tree.sampling.edit_tables import ROWS_AT_ONCE, BadWords, Entries, Penalties
from trtllm_tree.tree.verify_batch import TreeVerifyBatch

_FOREVER = 2**62
_BANNED = float("-inf")


@dataclass(frozen=True)
class EditKind:
    """What the edits of some rows look at; a captured step serves one value of it. The default edits nothing.

    Attributes:
        num_entries: added entries, rounded up as all of these, so that few kinds are captured.
        penalties: whether tokens are counted.
        num_words, word_len: bad words of several tokens, and tokens of the longest.
        bitmask: whether a slot has a grammar's bitmask.
    """

    num_entries: int = 0
    penalties: bool = False
    num_words: int = 0
    word_len: int = 0
    bitmask: bool = False


class LogitEdits:
    """The edits of every pool slot, at fixed addresses; a slot that was never set edits nothing.

    A table is allocated, between two steps, when the first request asks for it: penalties take five bytes a slot and
    vocabulary id, a bitmask one bit a row and id. Steps that edit hold intermediate results of max(B, 64) rows.

    Args:
        num_slots: pool slots, the dummy one included.
        max_rows: largest B * R.
        vocab_size: V.
        device: where the tables live.

    Attributes:
        kind: what the next `apply` edits, as planned.
    """

    def __init__(self, num_slots: int, max_rows: int, vocab_size: int, *, device: torch.device | str) -> None:
        self._num_slots, self._max_rows, self._vocab_size = num_slots, max_rows, vocab_size
        self._device = torch.device(device)
        self.kind = EditKind()
        self._kinds: dict[int, EditKind] = {}
        self._with_bitmask: set[int] = set()
        self._entries: Entries | None = None
        self._penalties: Penalties | None = None
        self._words: BadWords | None = None
        self._bitmask: torch.Tensor | None = None
        # -1 where a slot has no bitmask: all bits.
        self._ignores_bitmask = torch.full((num_slots,), -1, dtype=torch.int32, device=self._device)

    @property
    def bitmask(self) -> torch.Tensor:
        """int32 [max_rows, ceil(V / 32)]: bit v % 32 of word v // 32 allows id v in row b * R + r of the next rows.

        Whoever calls `use_bitmask` fills the rows of those slots before every `apply`; the others are not looked at.
        """
        if self._bitmask is None:
            shape = (self._max_rows, -(-self._vocab_size // 32))
            self._bitmask = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        return self._bitmask

    @property
    def is_active(self) -> bool:
        """Whether the next `apply` edits anything."""
        return self.kind != EditKind()

    def edits_any(self, slots: Sequence[int]) -> bool:
        """Whether any of these slots has an edit; rows of the others come out of `apply` as they went in."""
        return any(slot in self._kinds or slot in self._with_bitmask for slot in slots)

    def use_bitmask(self, slot: int, used: bool) -> None:
        """Whether the rows of `slot` obey the bitmask; `reset` says no."""
        if used != (slot in self._with_bitmask):
            (self._with_bitmask.add if used else self._with_bitmask.discard)(slot)
            self._ignores_bitmask[slot] = 0 if used else -1

    def reset(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        stop_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """A request with valid `params` takes pool slot `slot`.

        Args:
            stop_ids: ids that may not be generated before `params.min_tokens` others.
            bad_words: token sequences that may not be generated at all.
        """
        self.use_bitmask(slot, False)
        first_end = len(prompt_ids) + params.min_tokens
        entries = [(token, float(bias), _FOREVER) for token, bias in (params.logit_bias or {}).items()]
        if params.min_tokens:
            entries += [(token, _BANNED, first_end) for token in sorted(set(stop_ids))]
        entries += [(token, _BANNED, _FOREVER) for token in sorted({w[0] for w in bad_words if len(w) == 1})]
        words = [word for word in bad_words if len(word) > 1]
        if entries and self._entries is None:
            self._entries = Entries(self._num_slots, MAX_EDITED_IDS, self._device)
        if params.has_penalties and self._penalties is None:
            self._penalties = Penalties(self._num_slots, self._vocab_size, self._device)
        if words and self._words is None:
            self._words = BadWords(self._num_slots, MAX_BAD_WORDS, MAX_BAD_WORD_LEN, self._device)
        before = self._kinds.pop(slot, EditKind())
        if self._entries is not None and (entries or before.num_entries):
            self._entries.reset(slot, entries)
        if self._penalties is not None and (params.has_penalties or before.penalties):
            self._penalties.reset(slot, params.penalties, prompt_ids)
        if self._words is not None and (words or before.num_words):
            self._words.reset(slot, words)
        kind = EditKind(
            num_entries=_rounded(len(entries), (16, 128, MAX_EDITED_IDS)),
            penalties=params.has_penalties,
            num_words=_rounded(len(words), (8, 64, MAX_BAD_WORDS)),
            word_len=_rounded(max((len(word) for word in words), default=0), (4, 8, MAX_BAD_WORD_LEN)),
        )
        if kind != EditKind():
            self._kinds[slot] = kind

    def plan(self, slots: Sequence[int]) -> None:
        """The next rows are of these pool slots, and pad rows."""
        kinds = [self._kinds[slot] for slot in slots if slot in self._kinds]
        self.kind = EditKind(
            num_entries=max((kind.num_entries for kind in kinds), default=0),
            penalties=any(kind.penalties for kind in kinds),
            num_words=max((kind.num_words for kind in kinds), default=0),
            word_len=max((kind.word_len for kind in kinds), default=0),
            bitmask=not self._with_bitmask.isdisjoint(slots),
        )

    def apply(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        tokens: torch.Tensor | None,
        tree: TreeVerifyBatch | None,
        positions: torch.Tensor,
    ) -> None:
        """Edit `logits` in place, as planned. Never waits for the device; can be captured.

        Args:
            logits: float32 [B*R, V].
            slots: int64 [B], the requests' pool slots.
            tokens: int32 [B, R], the window's tokens, the root first: a committed one, told to `commit`. None where
                every request has one row.
            tree: the window's tree, or None for a chain.
            positions: int64 [B, R], where the rows lie; the tokens that they predict lie one further.
        """
        kind = self.kind
        if not self.is_active:
            return
        assert logits.dtype == torch.float32, f"logits are edited in float32, not {logits.dtype}"
        rows = logits.view(*positions.shape, -1)
        if kind.num_entries:
            assert self._entries is not None, "planned without a reset"
            self._entries.apply(rows, slots, positions, kind.num_entries)
        if kind.penalties:
            assert self._penalties is not None, "planned without a reset"
            self._penalties.apply(rows, slots, tokens, tree)
        if kind.num_words:
            assert self._words is not None, "planned without a reset"
            self._words.apply(rows, slots, tokens, tree, (kind.num_words, kind.word_len))
        if kind.bitmask:
            self._apply_bitmask(logits, slots, positions.shape[1])

    def commit(self, kept: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Output tokens were kept, in order, by the requests in these pool slots, which go on."""
        edited = [(slot, token) for slot, tokens in kept if slot in self._kinds for token in tokens]
        for table, wants in ((self._penalties, "penalties"), (self._words, "num_words")):
            pairs = [pair for pair in edited if getattr(self._kinds[pair[0]], wants)]
            if table is not None and pairs:
                table.count([slot for slot, _ in pairs], [token for _, token in pairs])

    def _apply_bitmask(self, logits: torch.Tensor, slots: torch.Tensor, num_rows: int) -> None:
        ignores = self._ignores_bitmask.index_select(0, slots).view(-1, 1, 1)
        words = self.bitmask[: logits.shape[0]].view(slots.shape[0], num_rows, -1) | ignores
        bit = torch.arange(32, dtype=torch.int32, device=logits.device)
        # Some rows at a time, so that the intermediate results stay small.
        for rows, masks in zip(
            logits.split(ROWS_AT_ONCE), words.flatten(0, 1).split(ROWS_AT_ONCE), strict=True
        ):
            allowed = (masks.unsqueeze(2) >> bit) & 1
            rows.masked_fill_(allowed.flatten(1)[:, : rows.shape[1]] == 0, _BANNED)


def _rounded(count: int, sizes: Sequence[int]) -> int:
    """The first size that is large enough; 0 stays 0."""
    return next(size for size in sizes if size >= count) if count else 0
