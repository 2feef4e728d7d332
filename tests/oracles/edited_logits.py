"""One row's edits in plain Python: what is known of one request, and the tokens before the one that is predicted.

It must not import the package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def edited_logits(
    row: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    min_tokens: int = 0,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    allowed: set[int] | None = None,
    **_others: Any,
) -> list[float]:
    """The row behind `prompt` and `output`: bias, penalties, then every ban."""
    edited = []
    for token, logit in enumerate(row):
        logit += (logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            logit = logit / repetition_penalty if logit > 0 else logit * repetition_penalty
        logit -= frequency_penalty * list(output).count(token)
        logit -= presence_penalty * (token in output)
        banned = token in stop_ids and len(output) < min_tokens
        for word in bad_words:
            beginning = list(word[:-1])
            banned |= token == word[-1] and list(output)[len(output) - len(beginning) :] == beginning
        banned |= allowed is not None and token not in allowed
        edited.append(-math.inf if banned else logit)
    return edited
