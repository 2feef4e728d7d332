"""Rejection sampling through the embedded engine; for the law of what it says see tests/sampling/test_laws.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.embedded_engine import CHAIN, MAIN, Sizes, Truths, greedy, prompts_of, run_to_end, tokens_of
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from trtllm_tree import LLM, SpeculativeConfig, UnsupportedError
from trtllm_tree.sampling.gumbel import GumbelSampler
from trtllm_tree.sampling.rejection import TreeRejectionSampler

NUM_TOKENS = 16
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 0.7, "top_p": 0.8},
    {},
    {"temperature": 1.5, "top_k": 20, "min_p": 0.01},
]


def make(target: Path, head: Path, sizes: Sizes, device: str, **options: Any) -> LLM:
    topk, steps, nodes = sizes
    config = SpeculativeConfig(
        tree_topk=topk,
        num_steps=steps,
        num_nodes=nodes,
        speculative_model=str(head),
        use_rejection_sampling=True,
    )
    defaults = {"device": device, "dtype": "float32", "tokens_per_block": 16, "max_seq_len": 256}
    return LLM(str(target), speculative_config=config, **defaults | {"cuda_graphs": False} | options)


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_a_seed_repeats_alone_and_in_a_batch_and_greedy_requests_stay_greedy(
    tiny_target: Path, tiny_head: Path, device: str, truths: Truths, sizes: Sizes
) -> None:
    llm = make(tiny_target, tiny_head, sizes, device)
    assert llm.spec_round is not None and isinstance(llm.spec_round.sampler, TreeRejectionSampler)
    prompts = prompts_of(truths)
    params = [greedy(NUM_TOKENS, seed=i, **OPTIONS[i % len(OPTIONS)]) for i in range(len(prompts))]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    other = make(
        tiny_target, tiny_head, sizes, device, tokens_per_block=32, max_num_tokens=13, max_batch_size=3
    )
    for index in (1, 2, 3, 4):
        assert llm.generate(prompts[index], params[index]).outputs[0].token_ids == together[index]
    assert [output.outputs[0].token_ids for output in other.generate(prompts, params)] == together
    for prompt, param, tokens in zip(prompts, params, together, strict=True):
        assert (tokens == truths[tuple(prompt)][:NUM_TOKENS]) == (not param.is_sampled)


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_drafts_are_accepted_and_only_kept_tokens_are_said(
    tiny_target: Path,
    tiny_head: Path,
    device: str,
    truths: Truths,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes,
) -> None:
    llm = make(tiny_target, tiny_head, sizes, device)
    KnownContinuation(llm, truths, monkeypatch)
    log = RoundLog(llm)
    # The law of one token: what is accepted and what is drawn is the target's likeliest.
    for option in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        params = greedy(NUM_TOKENS, temperature=1.5, seed=3, **option)
        outputs = llm.generate(prompts_of(truths), params)
        assert [o.outputs[0].token_ids for o in outputs] == [t[:NUM_TOKENS] for t in truths.values()]
    assert max(log.accept_lens) >= 4 and log.has_moved_rows == (sizes[0] > 1)


def test_what_rejection_says_is_said_as_often_by_plain_decoding(
    tiny_target: Path,
    tiny_head: Path,
    device: str,
    plain: LLM,
    truths: Truths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tokens behind a prompt, of two ids each, over 400 seeds; other seeds for plain decoding."""
    prompt = prompts_of(truths)[3]
    llm = make(tiny_target, tiny_head, MAIN, device)
    KnownContinuation(llm, truths, monkeypatch)

    def texts(llm: LLM, first_seed: int) -> list[tuple[int, ...]]:
        params = [greedy(3, temperature=1.0, top_k=2, seed=first_seed + i) for i in range(400)]
        requests = [llm.engine.add_request(prompt, each) for each in params]
        run_to_end(llm.engine)
        return [tuple(tokens[1:]) for tokens in tokens_of(requests)]

    found = texts(llm, 0)
    # By the same seeds plain decoding says something else.
    assert found != texts(plain, 0)
    by_rejection, by_plain = Counter(found), Counter(texts(plain, 10_000))
    assert len(by_plain) > 4
    for text in by_rejection | by_plain:
        # Four standard deviations of a difference of two counts of 400.
        spread = 4 * (by_rejection[text] + by_plain[text] + 1) ** 0.5
        assert abs(by_rejection[text] - by_plain[text]) < spread, text


def test_a_backend_that_verifies_no_trees_is_refused_at_startup_for_trees_only(
    tiny_target: Path, tiny_head: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in (GumbelSampler, TreeRejectionSampler):
        assert backend.supports_tree_verify
    monkeypatch.setattr(TreeRejectionSampler, "supports_tree_verify", False)
    make(tiny_target, tiny_head, CHAIN, device)
    with pytest.raises(UnsupportedError) as error:
        make(tiny_target, tiny_head, MAIN, device)
    (problem,) = error.value.problems
    assert (problem.option, problem.value) == ("sampling backend", "rejection")
