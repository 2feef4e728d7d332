"""The tables behind `LogitEdits`: added entries, penalties, bad words. One row a pool slot, all at fixed addresses.

Each edits logits in place with operations that can be captured, and leaves the rows of a slot that was never set, or
set to nothing, bit for bit alone. Must not know requests.

Legend: B requests, R rows of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_tree.tree.verify_batch import TreeVerifyBatch

# In a bad word's beginning: any token, and one that no token equals (nor the -1 before the output).
_ANY, _NOTHING = -2, -3
# Rows that are edited together where the intermediate results are as wide as the vocabulary.
ROWS_AT_ONCE = 64


def window_tree(
    tokens: torch.Tensor, tree: TreeVerifyBatch | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parents int64 [B, R] (the root's is 0), depths int64 [B, R], ancestors float32 [B, R, R] without the root."""
    batch, num_rows = tokens.shape
    row = torch.arange(num_rows, device=tokens.device)
    if tree is None:
        parents, depths = (row - 1).expand(batch, num_rows), row.expand(batch, num_rows)
        ancestors = (row <= row.unsqueeze(1)).expand(batch, num_rows, num_rows)
    else:
        parents, depths = tree.parents.long(), tree.depths.long()
        ancestors = (tree.ancestor_mask[:, :, row // 64] >> (row % 64)) & 1 != 0
    return parents.clamp(min=0), depths, (ancestors & (row > 0)).float()


class Entries:
    """Values added to single logits while the predicted token's position is below a bound."""

    def __init__(self, num_slots: int, capacity: int, device: torch.device) -> None:
        self._ids = torch.zeros(num_slots, capacity, dtype=torch.int64, device=device)
        self._values = torch.zeros(num_slots, capacity, dtype=torch.float32, device=device)
        self._untils = torch.zeros(num_slots, capacity, dtype=torch.int64, device=device)

    def reset(self, slot: int, entries: Sequence[tuple[int, float, int]]) -> None:
        """An entry (id, value, bound) adds the value to the logit of the id for tokens at positions below the bound."""
        count = len(entries)
        assert count <= self._ids.shape[1], f"{count} entries, at most {self._ids.shape[1]} fit"
        # Unused entries add nothing, to id 0.
        self._ids[slot] = 0
        self._values[slot] = 0.0
        self._untils[slot] = 0
        columns = zip(*entries, strict=True)
        for table, column in zip((self._ids, self._values, self._untils), columns, strict=False):
            table[slot, :count] = torch.tensor(column, dtype=table.dtype)

    def apply(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, num_entries: int
    ) -> None:
        """Edit `logits` [B, R, V], whose rows lie at `positions` [B, R], by the first `num_entries` entries."""
        ids, values, untils = (
            table[:, :num_entries].index_select(0, slots).unsqueeze(1)
            for table in (self._ids, self._values, self._untils)
        )
        shape = (*positions.shape, num_entries)
        values = values.expand(shape).masked_fill(positions.unsqueeze(2) + 1 >= untils, 0.0)
        logits.scatter_add_(2, ids.expand(shape), values)


class Penalties:
    """Repetition, presence and frequency penalties over the counts of each slot's tokens."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)
        # Repetition, frequency, presence.
        self._strengths = torch.tensor([[1.0], [0.0], [0.0]], device=device).repeat(1, num_slots)

    def reset(self, slot: int, strengths: tuple[float, float, float], prompt_ids: Sequence[int]) -> None:
        """Start counting a request's output; `strengths` are repetition, frequency and presence."""
        self._strengths[:, slot] = torch.tensor(strengths)
        self._counts[slot] = 0
        self._in_prompt[slot] = False
        self._in_prompt[slot, torch.tensor(prompt_ids, device=self._in_prompt.device)] = True

    def count(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Output token tokens[i] of the request in slots[i] was kept."""
        vocab_size = self._counts.shape[1]
        index = [slot * vocab_size + token for slot, token in zip(slots, tokens, strict=True)]
        where = torch.tensor(index, device=self._counts.device)
        self._counts.view(-1).index_add_(0, where, torch.ones_like(where, dtype=torch.int32))

    def apply(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        tokens: torch.Tensor | None,
        tree: TreeVerifyBatch | None,
    ) -> None:
        """Edit `logits` [B, R, V]. `tokens` [B, R] is the window, whose root is counted already; None for R = 1."""
        counts = self._counts.index_select(0, slots)
        in_prompt = self._in_prompt.index_select(0, slots)
        strengths = self._strengths.index_select(1, slots).view(3, -1, 1, 1)
        window: tuple[torch.Tensor, torch.Tensor] | None = None
        if tokens is not None and tokens.shape[1] > 1:
            # Only the window's own tokens have other counts than the committed text says. All of them are edited
            # anew in every row: equal tokens get equal values, and a count that the row adds nothing to is as it was.
            ids = tokens.long().clamp(min=0)
            _, _, ancestors = window_tree(tokens, tree)
            equal = (ids.unsqueeze(2) == ids.unsqueeze(1)).float()
            more = (ancestors @ equal).int()
            where = ids.unsqueeze(1).expand(more.shape)
            total = more + counts.gather(1, ids).unsqueeze(1)
            effect = _effect(total, in_prompt.gather(1, ids).unsqueeze(1), strengths)
            window = where, _penalised(logits.gather(2, where), *effect)
        effect = _effect(counts.unsqueeze(1), in_prompt.unsqueeze(1), strengths)
        # Some rows at a time, so that the intermediate results stay small.
        for rows in logits.split(max(1, ROWS_AT_ONCE // logits.shape[0]), dim=1):
            rows.copy_(_penalised(rows, *effect))
        if window is not None:
            logits.scatter_(2, *window)


def _effect(
    counts: torch.Tensor, in_prompt: torch.Tensor, strengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What logits are divided by or multiplied with, and what is then taken off."""
    repetition, frequency, presence = strengths.unbind()
    in_output = counts > 0
    factor = repetition.expand(counts.shape).masked_fill(~(in_prompt | in_output), 1.0)
    return factor, counts * frequency + in_output * presence


def _penalised(logits: torch.Tensor, factor: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return torch.where(logits > 0, logits / factor, logits * factor) - offset


class BadWords:
    """Token sequences of several tokens whose last token is banned behind the others."""

    def __init__(self, num_slots: int, capacity: int, max_len: int, device: torch.device) -> None:
        ints = {"dtype": torch.int32, "device": device}
        # Newest token first, in the beginnings as in the tails.
        self._beginnings = torch.full((num_slots, capacity, max_len - 1), _NOTHING, **ints)
        self._lasts = torch.zeros(num_slots, capacity, dtype=torch.int64, device=device)
        self._tails = torch.full((num_slots, max_len - 1), -1, **ints)
        self._outputs: dict[int, list[int]] = {}

    def reset(self, slot: int, words: Sequence[Sequence[int]]) -> None:
        """Ban `words`, each of 2 to max_len tokens."""
        assert len(words) <= self._lasts.shape[1], f"{len(words)} words, at most {self._lasts.shape[1]} fit"
        self._beginnings[slot] = _NOTHING
        self._lasts[slot] = 0
        self._tails[slot] = -1
        self._outputs.pop(slot, None)
        if words:
            self._outputs[slot] = []
            length = self._tails.shape[1]
            rows = [[*word[-2::-1], *[_ANY] * (length + 1 - len(word))] for word in words]
            self._beginnings[slot, : len(words)] = torch.tensor(rows, dtype=torch.int32)
            self._lasts[slot, : len(words)] = torch.tensor([word[-1] for word in words])

    def count(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Output token tokens[i] of the request in slots[i] was kept, in order."""
        length, changed = self._tails.shape[1], {}
        for slot, token in zip(slots, tokens, strict=True):
            if slot in self._outputs:
                self._outputs[slot] = changed[slot] = [token, *self._outputs[slot][: length - 1]]
        if changed:
            rows = [[*tail, *[-1] * (length - len(tail))] for tail in changed.values()]
            where = torch.tensor([*changed], device=self._tails.device)
            values = torch.tensor(rows, dtype=torch.int32, device=self._tails.device)
            self._tails.index_copy_(0, where, values)

    def apply(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        tokens: torch.Tensor | None,
        tree: TreeVerifyBatch | None,
        size: tuple[int, int],
    ) -> None:
        """Edit `logits` [B, R, V] by the first words, at most `size` = (words, tokens of the longest).

        `tokens` [B, R] is the window, whose root is the last token of the tail already; None for R = 1.
        """
        num_words, longest = size
        beginnings = self._beginnings[:, :num_words].index_select(0, slots).unsqueeze(1)
        lasts = self._lasts[:, :num_words].index_select(0, slots).unsqueeze(1)
        tails = self._tails.index_select(0, slots)
        shape = (*logits.shape[:2], num_words)
        matches = torch.ones(shape, dtype=torch.bool, device=logits.device)
        node = parents = depths = None
        if tokens is not None and tokens.shape[1] > 1:
            parents, depths, _ = window_tree(tokens, tree)
            node = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        for back in range(longest - 1):
            if tokens is None or node is None or parents is None or depths is None:
                token = tails[:, back : back + 1]
            else:
                # `back` tokens before the newest: on the way up to the root, or behind it in the committed text.
                committed = tails.gather(1, (back - depths).clamp(min=0))
                token = torch.where(back < depths, tokens.gather(1, node), committed)
                node = parents.gather(1, node)
            wanted = beginnings[..., back]
            matches &= (wanted == token.unsqueeze(2)) | (wanted == _ANY)
        values = torch.zeros(shape, device=logits.device).masked_fill_(matches, float("-inf"))
        logits.scatter_add_(2, lasts.expand(shape), values)
