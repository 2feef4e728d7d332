"""On the demo model, sampled with a seed, chain and tree keep the tokens that plain decoding draws (float32)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.demo.prompts import PROMPTS
from trtllm_tree import LLM, SamplingParams

MAX_TOKENS = 16
# Taken in turns by the prompts of one batch.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 100, "min_p": 0.02},
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="in bfloat16 near-ties part, see test_lossless.py")
def test_chain_and_tree_give_the_draws_of_plain_decoding(demo_llm: Callable[[str], LLM]) -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:16]]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, seed=seed, **OPTIONS[seed % len(OPTIONS)])
        for seed in range(len(chats))
    ]
    outputs = {kind: demo_llm(kind).generate(chats, params) for kind in ("plain", "chain", "tree")}
    tokens = {kind: [output.outputs[0].token_ids for output in each] for kind, each in outputs.items()}
    assert tokens["chain"] == tokens["plain"]
    assert tokens["tree"] == tokens["plain"]
    forwards = {
        kind: sum(output.acceptance.target_forwards for output in each) for kind, each in outputs.items()
    }
    assert forwards["tree"] < forwards["chain"] < forwards["plain"], "drafts should be accepted here too"
