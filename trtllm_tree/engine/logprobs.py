"""Log-probabilities on the host: from a step's rows to one dict a token, as vLLM and TensorRT-LLM return them."""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_tree.engine.ports import RowLogprobs
from trtllm_tree.outputs import Logprob, TokenLogprobs


def token_logprobs(rows: RowLogprobs | None, num_tops: Sequence[int | None]) -> list[list[TokenLogprobs]]:
    """One list of dicts a request; empty for requests that want nothing.

    Args:
        rows: of [B, D] kept tokens, or None if nobody wants anything.
        num_tops: [B], likeliest tokens that each request wants, or None.
    """
    if rows is None:
        return [[] for _ in num_tops]
    values, ids, ranks = (tensor.tolist() for tensor in rows)
    return [
        [] if num_top is None else [_entry(*token, num_top) for token in zip(i, v, r, strict=True)]
        for i, v, r, num_top in zip(ids, values, ranks, num_tops, strict=True)
    ]


def _entry(ids: list[int], values: list[float], rank: int, num_top: int) -> TokenLogprobs:
    """The chosen token, which comes first, and the `num_top` likeliest."""
    entry = {ids[0]: Logprob(values[0], rank)}
    for place in range(1, num_top + 1):
        entry.setdefault(ids[place], Logprob(values[place], place))
    return entry
