"""What the tests of the embedded host share: sizes, greedy parameters, and looks into an engine's pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trtllm_tree import LLM, SamplingParams
from trtllm_tree.engine.engine import Engine
from trtllm_tree.engine.request import Request

NUM_TOKENS = 60

# K, S, N
Sizes = tuple[int, int, int]
CHAIN: Sizes = (1, 4, 5)
MAIN: Sizes = (4, 5, 32)

# Prompts and their plain continuations, NUM_TOKENS each.
Truths = dict[tuple[int, ...], list[int]]
# build(sizes, **engine_options)
Build = Callable[..., LLM]


def greedy(max_tokens: int = NUM_TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def prompts_of(truths: Truths) -> list[list[int]]:
    return [list(prompt) for prompt in truths]


def truths_of(llm: LLM, prompt_lengths: Sequence[int], num_tokens: int = NUM_TOKENS) -> Truths:
    """Random prompts of these lengths, and what an LLM without a drafter says to them."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in prompt_lengths]
    outputs = llm.generate(prompts, greedy(num_tokens))
    return {tuple(p): o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)}


def tokens_of(requests: list[Request]) -> list[list[int]]:
    return [request.output.token_ids for request in requests]


def run_to_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def num_free(engine: Engine) -> list[int]:
    return [group.allocator.num_free for group in engine.cache.groups]


def poison_pools(engine: Engine) -> None:
    """NaN in every KV row but the dummy page's, which is read near a request's limit."""
    for group in engine.cache.groups:
        for pool in group.pools.values():
            pool[1:].fill_(torch.nan)


def assert_all_returned(llm: LLM, before: list[int]) -> None:
    assert not llm.engine.has_work
    assert num_free(llm.engine) == before
    for group in llm.engine.cache.groups:
        assert not group.page_table.any(), "a page table row still names pages"
