"""Invariant I14 through the embedded engine: a seed's tokens are plain decoding's, whatever is drafted or batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hosts.embedded_engine import (
    CHAIN,
    MAIN,
    Build,
    Sizes,
    Truths,
    greedy,
    poison_pools,
    prompts_of,
    run_to_end,
    tokens_of,
)
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from trtllm_tree import LLM, RequestError, SamplingParams

NUM_TOKENS = 24
SEED = 2**64 - 12345
# One a prompt of a batch, each with its own seed: all temperatures, without and with every restriction.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.5},
    {},
]


def params_of(index: int, **options: Any) -> SamplingParams:
    return greedy(
        **{"max_tokens": NUM_TOKENS, "seed": SEED + index} | OPTIONS[index % len(OPTIONS)] | options
    )


@pytest.fixture(scope="module")
def sampled(plain: LLM, truths: Truths) -> Truths:
    """Plain decoding's draws, each request alone."""
    return {
        tuple(prompt): plain.generate(prompt, params_of(index)).outputs[0].token_ids
        for index, prompt in enumerate(prompts_of(truths))
    }


def test_sampling_draws_other_tokens_than_the_argmax_and_greedy_requests_do_not(
    truths: Truths, sampled: Truths
) -> None:
    for index, (prompt, tokens) in enumerate(sampled.items()):
        assert (tokens == truths[prompt][:NUM_TOKENS]) == (not OPTIONS[index])


@pytest.mark.parametrize("rotation", range(0, 8, 3))
@pytest.mark.parametrize("sizes", [None, CHAIN, MAIN, (3, 4, 20)], ids=str)
def test_plain_chain_and_tree_draw_the_same_tokens_in_a_batch(
    build: Build,
    plain: LLM,
    truths: Truths,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes | None,
    rotation: int,
) -> None:
    """Every prompt meets other parameters in another rotation. The drafter hits the sampled tokens."""
    prompts = prompts_of(truths)
    params = [params_of(index + rotation) for index in range(len(prompts))]
    want = [plain.generate(p, q).outputs[0].token_ids for p, q in zip(prompts, params, strict=True)]
    if sizes is None:
        outputs = plain.generate(prompts, params)
    else:
        llm = build(sizes)
        known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, want, strict=True)}
        KnownContinuation(llm, known, monkeypatch)
        log = RoundLog(llm)
        poison_pools(llm.engine)
        outputs = llm.generate(prompts, params)
        # What the stress is for really happened.
        assert max(log.accept_lens) >= 4 and log.has_moved_rows == (sizes[0] > 1)
    assert [output.outputs[0].token_ids for output in outputs] == want


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_a_head_that_is_never_right_changes_no_draw(
    build: Build, truths: Truths, sampled: Truths, sizes: Sizes
) -> None:
    params = [params_of(index) for index in range(len(sampled))]
    outputs = build(sizes).generate(prompts_of(truths), params)
    assert [output.outputs[0].token_ids for output in outputs] == list(sampled.values())


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("sizes", [None, CHAIN, MAIN], ids=str)
def test_page_size_prefill_chunk_and_company_change_no_draw(
    build: Build,
    tiny_target: Path,
    device: str,
    sampled: Truths,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes | None,
    page_size: int,
) -> None:
    options: dict[str, Any] = {"tokens_per_block": page_size, "max_num_tokens": 13, "max_batch_size": 3}
    if sizes is None:
        llm = LLM(str(tiny_target), device=device, dtype="float32", max_seq_len=256, **options)
    else:
        llm = build(sizes, **options)
        KnownContinuation(llm, sampled, monkeypatch)
    requests = []
    for index, prompt in enumerate(sampled):
        requests.append(llm.engine.add_request(list(prompt), params_of(index)))
        llm.engine.step()
    run_to_end(llm.engine)
    assert tokens_of(requests) == list(sampled.values())


def test_a_seed_repeats_and_another_one_differs(plain: LLM, build: Build, truths: Truths) -> None:
    prompt = prompts_of(truths)[3]
    for llm in (plain, build(MAIN)):
        runs = [
            llm.generate(prompt, greedy(NUM_TOKENS, temperature=1.0, seed=seed)).outputs[0].token_ids
            for seed in (7, 7, 8, 7 + 2**32, 7 + 2**63)
        ]
        assert runs[0] == runs[1]
        assert len({tuple(run) for run in runs}) == 4


def test_without_a_seed_each_request_draws_its_own_and_keeps_it(plain: LLM, truths: Truths) -> None:
    prompt, params = prompts_of(truths)[3], greedy(NUM_TOKENS, temperature=1.0)
    requests = [plain.engine.add_request(prompt, params) for _ in range(2)]
    run_to_end(plain.engine)
    first, second = tokens_of(requests)
    assert first != second and requests[0].seed != requests[1].seed
    again = plain.generate(prompt, greedy(NUM_TOKENS, temperature=1.0, seed=requests[0].seed))
    assert again.outputs[0].token_ids == first


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_a_slot_forgets_the_request_before(build: Build, truths: Truths, sizes: Sizes) -> None:
    llm = build(sizes, max_batch_size=1)
    prompt = prompts_of(truths)[2]
    llm.generate(prompt, greedy(4, temperature=1.5, top_k=5, seed=1))
    assert llm.generate(prompt, greedy(9)).outputs[0].token_ids == truths[tuple(prompt)][:9]


def test_restrictions_to_one_token_are_greedy(build: Build, truths: Truths) -> None:
    llm = build(MAIN)
    prompt = prompts_of(truths)[4]
    for option in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        output = llm.generate(prompt, greedy(12, temperature=1.5, seed=3, **option))
        assert output.outputs[0].token_ids == truths[tuple(prompt)][:12], option


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_stops_inside_an_accepted_path_cut_sampled_output(
    build: Build, sampled: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    llm = build(sizes)
    KnownContinuation(llm, sampled, monkeypatch, hit_rate=1.0)
    prompts = [list(prompt) for prompt in sampled]
    stops = [tokens[5 + index] for index, tokens in enumerate(sampled.values())]
    params = [params_of(index, stop_token_ids=[stop]) for index, stop in enumerate(stops)]
    outputs = llm.generate(prompts, params)
    for tokens, stop, output in zip(sampled.values(), stops, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == tokens[: tokens.index(stop) + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_every_wrong_option_is_named_at_once(plain: LLM) -> None:
    params = SamplingParams(temperature=-1, top_p=2.0, top_k=-3, min_p=1.5, seed=-1)
    with pytest.raises(RequestError) as error:
        plain.generate([5], params)
    options = [problem.option for problem in error.value.problems]
    assert options == ["temperature", "top_p", "top_k", "min_p", "seed"]
