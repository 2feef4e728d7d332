"""The demo model, plain and with drafts, loaded once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from trtllm_tree import LLM, SpeculativeConfig

CHAIN = SpeculativeConfig(tree_topk=1, num_steps=5)
TREE = SpeculativeConfig(tree_topk=4, num_steps=5, num_nodes=32)


@pytest.fixture(scope="session")
def demo_llm() -> Iterator[Callable[[str], LLM]]:
    """`demo_llm("plain" | "chain" | "tree")`, float32 on a CPU and bfloat16 on a GPU."""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    loaded: dict[str, LLM] = {}

    def get(kind: str) -> LLM:
        if kind not in loaded:
            config = {"plain": None, "chain": CHAIN, "tree": TREE}[kind]
            loaded[kind] = LLM("demo", speculative_config=config, dtype=dtype, max_seq_len=1024)
        return loaded[kind]

    yield get
    for llm in loaded.values():
        llm.close()
