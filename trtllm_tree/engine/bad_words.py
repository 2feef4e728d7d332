"""Bad words as token sequences, and what is wrong with the token ids that a request names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtllm_tree.config.sampling import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_EDITED_IDS,
    SamplingParams,
)
from trtllm_tree.errors import Problem, RequestError


def bad_word_tokens(params: SamplingParams, tokenizer: Any) -> list[tuple[int, ...]]:
    """Token sequences that valid `params` ban, each once; strings at the start of a text and behind a space.

    Behind a space counts only where that makes another first token of as many, as in vLLM.

    Raises:
        RequestError: strings without a tokenizer.
    """
    if params.bad_words and tokenizer is None:
        rule, remedy = "strings need the model's tokenizer", "Use bad_words_ids."
        raise RequestError(Problem("bad_words", params.bad_words, rule, remedy))
    sequences = [tuple(word) for word in params.bad_words_ids or []]
    for word in params.bad_words or []:
        bare, spaced = (
            tuple(tokenizer(prefix + word.lstrip(), add_special_tokens=False)["input_ids"])
            for prefix in ("", " ")
        )
        sequences.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences.append(spaced)
    return list(dict.fromkeys(sequences))


def edit_problems(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], stop_ids: Sequence[int], vocab_size: int
) -> list[Problem]:
    """What this model cannot honour of valid `params`."""
    problems = []
    named = {
        "logit_bias": list(params.logit_bias or {}),
        "stop_token_ids": list(params.stop_token_ids or []),
        "bad_words_ids": [token for word in params.bad_words_ids or [] for token in word],
    }
    for option, tokens in named.items():
        if bad := [token for token in tokens if token >= vocab_size]:
            rule = f"token ids must lie in [0, {vocab_size})"
            problems.append(Problem(option, bad[:5], rule, "Use this model's token ids."))
    banned = {word[-1] for word in bad_words} | (set(stop_ids) if params.min_tokens else set())
    if len(banned) >= vocab_size:
        rule, remedy = "some token of the vocabulary must be left", "Ban fewer."
        problems.append(Problem("bad_words", len(banned), rule, remedy))
    num_words = sum(len(word) > 1 for word in bad_words)
    num_ids = len(bad_words) - num_words + len(params.logit_bias or {})
    num_ids += len(set(stop_ids)) if params.min_tokens else 0
    longest = max((len(word) for word in bad_words), default=0)
    for option, value, most, what in (
        ("logit_bias", num_ids, MAX_EDITED_IDS, "token ids in logit_bias, bad words of one token and stops"),
        ("bad_words", num_words, MAX_BAD_WORDS, "bad words of several tokens"),
        ("bad_words", longest, MAX_BAD_WORD_LEN, "tokens of a bad word"),
    ):
        if value > most:
            problems.append(Problem(option, value, f"at most {most} {what} are served", "Name fewer."))
    return problems
