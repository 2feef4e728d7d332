"""What the tests on an installed TensorRT-LLM share."""

from __future__ import annotations

import pytest

from tests.tensorrt_llm.engines import NearTie, Pair, chat_prompts, test_pair

NUM_PROMPTS = 12


@pytest.fixture(scope="session")
def pair() -> Pair:
    """Target and head."""
    return test_pair()


@pytest.fixture(scope="session")
def prompts(pair: Pair) -> list[list[int]]:
    """More than fit a small batch."""
    return chat_prompts(pair.model, NUM_PROMPTS)


@pytest.fixture(scope="session")
def near_tie(pair: Pair) -> NearTie:
    """The target in float32."""
    return NearTie(pair.model)
