"""A model pair whose drafts are often accepted, and the runtime double in either layout."""

from __future__ import annotations

import pytest

from tests.hosts.tensorrt_llm.tree_runs import agreeing_pair, embedded_tokens
from tests.hosts.tensorrt_llm.worker.runs import LENGTHS, PROMPTS, Pair
from trtllm_tree import SamplingParams


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return agreeing_pair(tmp_path_factory.mktemp("agreeing"))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in LENGTHS]
    return embedded_tokens(*pair, PROMPTS, params)
