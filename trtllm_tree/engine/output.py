"""A request's growing output: ids, text, and the one place that decides where it ends.

Tokens come in runs (a decode step may keep several), but they are looked at one by one, so that a stop token, a
stop string and the token limit inside a run cut ids, text and usage at the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtllm_tree.config.sampling import SamplingParams


class OutputText:
    """Ids and text of one sequence.

    Args:
        tokenizer: a transformers fast tokenizer, or None when only ids are wanted.
        params: stop conditions.
        eos_ids: the model's own stop tokens.

    Attributes:
        token_ids: ids so far, a stop token included.
        finish_reason: None, "stop" or "length"; or what the engine ended it with.
        stop_reason: the stop token id or stop string, if one ended the sequence.
    """

    def __init__(self, tokenizer: Any | None, params: SamplingParams, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._stops = params.stop_strings
        # Nothing can follow the end of a grammar.
        is_endless = params.ignore_eos and params.guided_decoding is None
        self._eos_ids = frozenset() if is_endless else frozenset(eos_ids)
        self._stop_ids = frozenset(params.stop_token_ids or [])
        self._text = ""
        # Text of the first min_tokens tokens: no stop string ends in it.
        self._first_stop_end = 0
        # The latest ids; the first `_num_shown` of them are in the text, and give the others their context.
        self._tail: list[int] = []
        self._num_shown = 0
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """Text that can be shown: all of it at the end; before, without a tail that may become a stop string."""
        if self.finish_reason is not None:
            return self._text
        return self._text[: len(self._text) - self._held_back()]

    def extend(self, tokens: Sequence[int]) -> int:
        """Append `tokens` up to the first stop condition; returns how many were kept."""
        for count, token in enumerate(tokens, start=1):
            self._append(token)
            if self.finish_reason is not None:
                return count
        return len(tokens)

    def finish(self, reason: str) -> None:
        """End the sequence here; what was held back becomes text."""
        self.finish_reason = reason
        self._text += self._undecided()

    def _append(self, token: int) -> None:
        self.token_ids.append(token)
        is_stop_token = token in self._eos_ids or token in self._stop_ids
        if not is_stop_token or self._params.include_stop_str_in_output:
            self._decode(token)
        if is_stop_token:
            self.stop_reason = token
            self.finish("stop")
        elif len(self.token_ids) > self._params.min_tokens and (stop := self._find_stop()) is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif len(self.token_ids) >= self._params.max_tokens:
            self.finish("length")
        if len(self.token_ids) <= self._params.min_tokens:
            self._first_stop_end = len(self._text)

    def _decode(self, token: int) -> None:
        """Append the text of `token`, unless it ends inside a character."""
        self._tail.append(token)
        piece = self._undecided()
        if piece and not piece.endswith("\ufffd"):
            self._text += piece
            self._tail = self._tail[self._num_shown :]
            self._num_shown = len(self._tail)

    def _undecided(self) -> str:
        """Text of the tail behind what is shown of it.

        Cut by length: byte-fallback decoders rewrite what was shown when invalid bytes follow it, where the
        DecodeStream of tokenizers raises.
        """
        if self._tokenizer is None:
            return ""
        whole, shown = (
            self._tokenizer.backend_tokenizer.decode(
                ids, skip_special_tokens=self._params.skip_special_tokens
            )
            for ids in (self._tail, self._tail[: self._num_shown])
        )
        return whole[len(shown) :]

    def _find_stop(self) -> str | None:
        """The stop string that ends earliest; cuts the text there."""
        first_end = self._first_stop_end + 1
        found = [(self._text.find(stop, max(first_end - len(stop), 0)), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not found:
            return None
        end, start, stop = min(found)
        self._text = self._text[: end if self._params.include_stop_str_in_output else start]
        return stop

    def _held_back(self) -> int:
        """Length of the longest tail of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
