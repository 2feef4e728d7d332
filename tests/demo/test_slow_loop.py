"""The engine against a slow, dense, independent EAGLE3 loop on the real models (bug class A1).

Compared round by round: the drafted trees, the accepted lengths, the number of target forwards. And a tree
that contains the chain never keeps less than the chain would, at any step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.demo.prompts import PROMPTS
from tests.oracles import eagle_loop
from trtllm_tree import LLM, RequestOutput, SamplingParams
from trtllm_tree.demo import resolve_head, resolve_target
from trtllm_tree.draft.eagle import Candidates
from trtllm_tree.sampling.base import Accepted

MAX_TOKENS = 40
FEATURE_LAYERS = (2, 15, 27)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares float32 runs on a CPU")


class TreeLog:
    """Every tree that was drafted for the one running request."""

    def __init__(self) -> None:
        self.trees: list[tuple[list[int], list[int]]] = []

    def on_drafted(self, slots: torch.Tensor, candidates: Candidates) -> None:
        assert candidates.parents is not None
        self.trees.append((candidates.tokens[0].tolist(), candidates.parents[0].tolist()))

    def on_verified(self, slots: torch.Tensor, accepted: Accepted) -> None:
        """Nothing to keep."""


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    """The target in transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(resolve_target("demo"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def slow_head(target: torch.nn.Module) -> eagle_loop.SlowHead:
    """The head as plain matrices."""
    return eagle_loop.SlowHead(resolve_head("demo"), target.get_input_embeddings().weight.detach())


@torch.inference_mode()
def _features(target: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in FEATURE_LAYERS], dim=-1)


def _run(llm: LLM, prompt: str) -> RequestOutput:
    return llm.generate([{"role": "user", "content": prompt}], SamplingParams(max_tokens=MAX_TOKENS))


@pytest.mark.parametrize("prompt", PROMPTS[:8])
def test_engine_and_slow_loop_draft_the_same_trees_and_keep_the_same_tokens(
    demo_llm: Callable[[str], LLM], target: torch.nn.Module, slow_head: eagle_loop.SlowHead, prompt: str
) -> None:
    llm, log = demo_llm("tree"), TreeLog()
    assert llm.spec_round is not None
    llm.spec_round.observer = log
    try:
        tree = _run(llm, prompt)
    finally:
        llm.spec_round.observer = None
    chain = _run(demo_llm("chain"), prompt)
    assert chain.outputs[0].token_ids == tree.outputs[0].token_ids

    tokens = tree.prompt_token_ids + tree.outputs[0].token_ids
    with torch.inference_mode():
        features = _features(target, tokens)
        num_prompt = len(tree.prompt_token_ids)
        rounds = eagle_loop.run(slow_head, features, tokens, num_prompt, topk=4, steps=5, nodes=32)
        chain_forwards = eagle_loop.chain_forwards(slow_head, features, tokens, num_prompt, steps=5)

    assert len(rounds) == tree.acceptance.target_forwards
    assert [r.tree_accept for r in rounds] == tree.acceptance.accept_lens
    assert chain_forwards == chain.acceptance.target_forwards
    for slow, fast in zip(rounds, log.trees, strict=False):
        assert (slow.tokens, slow.parents) == fast
    for slow in rounds:
        if slow.contains_chain:
            assert slow.tree_accept >= slow.chain_accept
    assert any(slow.contains_chain for slow in rounds), "the property above was never looked at"
