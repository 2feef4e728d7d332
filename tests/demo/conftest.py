"""The demo model, plain and with drafts, loaded once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from trtllm_tree import LLM, SpeculativeConfig

CHAIN = SpeculativeConfig(tree_topk=1, num_steps=5)
TREE = SpeculativeConfig(tree_topk=4, num_steps=5, num_nodes=32)


@pytest.fixture(scope="session")
def demo_llm() -> Iterator[Callable[..., LLM]]:
    """`demo_llm("plain" | "chain" | "tree", kv_cache_dtype="auto")`, float32 on a CPU and bfloat16 on a GPU."""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    loaded: dict[tuple[str, str], LLM] = {}

    def get(kind: str, kv_cache_dtype: str = "auto") -> LLM:
        key = (kind, kv_cache_dtype)
        if key not in loaded:
            config = {"plain": None, "chain": CHAIN, "tree": TREE}[kind]
            options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "max_seq_len": 1024}
            loaded[key] = LLM("demo", speculative_config=config, **options)
        return loaded[key]

    yield get
    for llm in loaded.values():
        llm.close()
