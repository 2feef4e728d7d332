"""Tiny LLMs for the embedded host, and what plain decoding says to a fixed set of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.embedded_engine import Build, Sizes, Truths, greedy
from trtllm_tree import LLM, SpeculativeConfig

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 31, 40, 66)


@pytest.fixture
def build(tiny_target: Path, tiny_head: Path, device: str) -> Build:
    """Makes an LLM with speculation of the given sizes, in float32."""

    def make(sizes: Sizes, **options: Any) -> LLM:
        topk, steps, nodes = sizes
        config = SpeculativeConfig(
            tree_topk=topk, num_steps=steps, num_nodes=nodes, speculative_model=str(tiny_head)
        )
        defaults = {"device": device, "dtype": "float32", "tokens_per_block": 16, "max_seq_len": 256}
        # These tests replace parts of a step by Python; graphs have their own (tests/gpu).
        defaults |= {"cuda_graphs": False}
        return LLM(str(tiny_target), speculative_config=config, **defaults | options)

    return make


@pytest.fixture(scope="session")
def plain(tiny_target: Path, device: str) -> Iterator[LLM]:
    """Plain decoding."""
    with LLM(str(tiny_target), device=device, dtype="float32", max_seq_len=512) as llm:
        yield llm


@pytest.fixture(scope="session")
def truths(plain: LLM) -> Truths:
    """Prompts around page borders, and their plain continuations."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    outputs = plain.generate(prompts, greedy())
    return {tuple(p): o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)}
