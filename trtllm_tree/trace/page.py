"""Recorded rounds as one HTML file that needs nothing else: page.html with the rounds in it as JSON.

Owns what the page is told. How it looks, and the layout of the trees, is in page.html. Knows no model.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from trtllm_tree.trace.recorder import TracedRound


def render_html(
    rounds: Sequence[TracedRound],
    decode: Callable[[int], str],
    *,
    title: str,
    summary: Mapping[str, object],
    prompt: str = "",
) -> str:
    """The page of one request's rounds.

    Args:
        rounds: in order.
        decode: the text of a token, its leading space included.
        title: the page's heading.
        summary: label to value, shown in this order.
        prompt: what was asked, as the user wrote it.
    """
    # The first root is the token that prefill predicted.
    used = {token for item in rounds for token in (*item.tokens, *item.kept) if token >= 0}
    data = {
        "summary": [[label, str(value)] for label, value in summary.items()],
        "prompt": prompt,
        "texts": {token: decode(token) for token in sorted(used)},
        "rounds": [_round_data(item) for item in rounds],
    }
    # "<" as an escape: neither "</script" nor "<!--" can end or change the script element.
    payload = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"title": html.escape(title), "data": payload}
    template = files("trtllm_tree.trace").joinpath("page.html").read_text(encoding="utf-8")
    # One pass, so that a marker inside a title or a token stays text.
    return re.sub(r"\{\{(title|data)\}\}", lambda found: parts[found[1]], template)


def _round_data(item: TracedRound) -> dict[str, Any]:
    scores = item.scores
    if scores is not None:
        # JSON has no infinities; null is drawn as a node without a probability.
        scores = [round(score, 4) if math.isfinite(score) else None for score in scores]
    return {
        "tokens": item.tokens,
        "parents": item.parents,
        "scores": scores,
        "path": item.path,
        "kept": item.kept,
        "output": item.num_output,
    }
