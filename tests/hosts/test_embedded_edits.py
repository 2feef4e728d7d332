"""Penalties, biases, bans and min_tokens through the embedded engine: a tree honours what plain decoding does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

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
from tests.oracles.edited_logits import edited_logits
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from tests.oracles.seeded_draw import seeded_draw
from trtllm_tree import LLM, RequestError, SamplingParams, SpeculativeConfig

NUM_TOKENS = 24
NOTHING = 6


def options_of(truths: Truths, index: int) -> dict[str, Any]:
    """What request `index` asks for. Each option bites on the unedited continuation of its prompt."""
    tokens = list(truths.values())[index]
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.6},
        {"frequency_penalty": 1.2, "presence_penalty": 0.7},
        {"logit_bias": {tokens[2]: -3.0, tokens[7]: 1.5, 40: 2.0}},
        {"min_tokens": 15, "stop_token_ids": sorted(set(tokens[3:6]))},
        {"bad_words_ids": [tokens[1:3], tokens[4:7], [tokens[9]]]},
        {
            "presence_penalty": 2.0,
            "bad_words_ids": [tokens[3:5]],
            "min_tokens": 9,
            "stop_token_ids": [tokens[1]],
        },
        {},
        {"repetition_penalty": 0.8, "logit_bias": {50: 4.0}, "frequency_penalty": 1.5},
    ]
    return options[index]


def params_of(truths: Truths, index: int, **options: Any) -> SamplingParams:
    return greedy(NUM_TOKENS, **options_of(truths, index) | options)


@pytest.fixture(scope="module", params=["greedy", "sampled"])
def edited(request: pytest.FixtureRequest, plain: LLM, truths: Truths) -> dict[tuple[int, ...], Any]:
    """Per prompt, the parameters and what plain decoding says, alone."""
    draws = {"temperature": 0.9, "top_p": 0.95, "seed": 77} if request.param == "sampled" else {}
    each = [(prompt, params_of(truths, index, **draws)) for index, prompt in enumerate(truths)]
    return {p: (params, plain.generate([*p], params).outputs[0].token_ids) for p, params in each}


@pytest.fixture(scope="module")
def model(tiny_target: Path, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    return model.to(device)


def test_plain_decoding_follows_the_slow_oracle(
    model: Any, truths: Truths, edited: dict[tuple[int, ...], Any]
) -> None:
    """transformers' logits, edited in plain Python; the argmax or the oracle's draw."""
    for index, (prompt, (params, tokens)) in enumerate(edited.items()):
        options = options_of(truths, index)
        stops = options.pop("stop_token_ids", [])
        words = options.pop("bad_words_ids", [])
        output: list[int] = []
        while len(output) < NUM_TOKENS and not (output and output[-1] in stops):
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *output]], device=model.device)
                row = model(ids).logits[0, -1].float().tolist()
            # The model's own end tokens are banned before min_tokens, too.
            ends = [*stops, 2]
            row = edited_logits(row, prompt, output, stop_ids=ends, bad_words=words, **options)
            if params.temperature:
                position = len(prompt) + len(output)
                output.append(seeded_draw(row, 77, position, params.temperature, 0, params.top_p, 0.0))
            else:
                output.append(max(range(len(row)), key=row.__getitem__))
        assert tokens == output, options
        assert (tokens == truths[prompt][: len(tokens)]) <= (index == NOTHING or bool(params.temperature))


@pytest.mark.parametrize("sizes", [None, CHAIN, MAIN, (3, 4, 20), (2, 3, 5)], ids=str)
def test_plain_chain_and_tree_give_the_same_tokens_in_a_mixed_batch(
    build: Build,
    plain: LLM,
    edited: dict[tuple[int, ...], Any],
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes | None,
) -> None:
    prompts = [list(prompt) for prompt in edited]
    params = [params for params, _ in edited.values()]
    want = {prompt: tokens for prompt, (_, tokens) in edited.items()}
    if sizes is None:
        outputs = plain.generate(prompts, params)
    else:
        llm = build(sizes)
        KnownContinuation(llm, want, monkeypatch)
        log = RoundLog(llm)
        poison_pools(llm.engine)
        outputs = llm.generate(prompts, params)
        # What the stress is for really happened.
        assert max(log.accept_lens) >= 3 and log.has_moved_rows == (sizes[0] > 1)
    assert [output.outputs[0].token_ids for output in outputs] == list(want.values())


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_requests_that_come_and_go_leak_nothing(
    build: Build, edited: dict[tuple[int, ...], Any], monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    """Two slots for eight requests, in chunks, twice over and in both orders."""
    llm = build(sizes, max_batch_size=2, max_num_tokens=13)
    KnownContinuation(llm, {prompt: tokens for prompt, (_, tokens) in edited.items()}, monkeypatch)
    each = [*edited.items(), *reversed(edited.items())]
    requests = []
    for prompt, (params, _) in each:
        requests.append(llm.engine.add_request(list(prompt), params))
        llm.engine.step()
    run_to_end(llm.engine)
    assert tokens_of(requests) == [tokens for _, (_, tokens) in each]


@pytest.mark.parametrize("sizes", [None, CHAIN, MAIN], ids=str)
def test_a_word_of_text_is_never_said(build: Build, plain: LLM, truths: Truths, sizes: Sizes | None) -> None:
    llm = plain if sizes is None else build(sizes)
    prompt = prompts_of(truths)[3]
    tokenizer = llm.tokenizer
    letters = {tokenizer(letter, add_special_tokens=False)["input_ids"][0]: 60.0 for letter in "xyz"}
    free = llm.generate(prompt, greedy(12, logit_bias=letters)).outputs[0].text
    assert set(free) <= set("xyz")
    word = free[4:7]
    said = llm.generate(prompt, greedy(12, logit_bias=letters, bad_words=[word])).outputs[0].text
    assert word in free and word not in said and said.startswith(free[:6])


@pytest.mark.parametrize("sizes", [None, CHAIN, MAIN], ids=str)
def test_no_end_token_stop_id_or_stop_string_ends_the_output_before_min_tokens(
    build: Build, plain: LLM, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes | None
) -> None:
    """The end is inside an accepted path: the drafter is always right."""
    llm = plain if sizes is None else build(sizes)
    prompt = prompts_of(truths)[5]
    eos = llm.tokenizer.eos_token_id
    want: dict[str, tuple[SamplingParams, list[int]]] = {}
    both: dict[str, dict[str, Any]] = {
        "eos": {"logit_bias": {eos: 40.0}},
        "stop id": {"logit_bias": {50: 40.0}, "stop_token_ids": [50], "ignore_eos": True},
    }
    for name, ends in both.items():
        params = SamplingParams(max_tokens=20, **ends)
        assert plain.generate(prompt, params).outputs[0].length == 1, name
        params = SamplingParams(max_tokens=20, min_tokens=7, **ends)
        completion = plain.generate(prompt, params).outputs[0]
        assert completion.length == 8 and completion.finish_reason == "stop", name
        want[name] = (params, completion.token_ids)
    letter = llm.tokenizer("x", add_special_tokens=False)["input_ids"][0]
    params = greedy(20, min_tokens=7, logit_bias={letter: 60.0}, stop="xxx")
    completion = plain.generate(prompt, params).outputs[0]
    assert (completion.length, completion.text, completion.stop_reason) == (8, "xxxxx", "xxx")
    want["stop string"] = (params, completion.token_ids)
    if sizes is not None:
        for params, tokens in want.values():
            KnownContinuation(llm, {tuple(prompt): tokens}, monkeypatch, hit_rate=1.0)
            log = RoundLog(llm)
            completion = llm.generate(prompt, params).outputs[0]
            assert completion.token_ids == tokens and max(log.accept_lens) >= 4
            assert completion == plain.generate(prompt, params).outputs[0]
            monkeypatch.undo()


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_rejection_sampling_draws_by_the_edited_law(
    tiny_target: Path,
    tiny_head: Path,
    device: str,
    plain: LLM,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes,
) -> None:
    """Biases and bad words leave one legal token behind every token but the first, at any temperature."""
    xyz = [plain.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "xyz"]
    after = [(a, b) for a in range(3) for b in range(3) if (b - a) % 3 != 1]
    params = greedy(
        NUM_TOKENS,
        temperature=1.5,
        seed=3,
        logit_bias=dict.fromkeys(xyz, 100.0),
        bad_words_ids=[[xyz[a], xyz[b]] for a, b in after],
        frequency_penalty=1.0,
    )
    topk, steps, nodes = sizes
    config = SpeculativeConfig(
        tree_topk=topk,
        num_steps=steps,
        num_nodes=nodes,
        speculative_model=str(tiny_head),
        use_rejection_sampling=True,
    )
    options: dict[str, Any] = {"device": device, "dtype": "float32", "max_seq_len": 256}
    llm = LLM(str(tiny_target), speculative_config=config, cuda_graphs=False, **options)
    prompt = [7, 8, 9]
    want = plain.generate(prompt, params).outputs[0]
    assert want.text in "xyz" * 9
    KnownContinuation(llm, {tuple(prompt): want.token_ids}, monkeypatch, hit_rate=1.0)
    log = RoundLog(llm)
    assert llm.generate(prompt, params).outputs[0] == want
    assert max(log.accept_lens) >= 4


def test_every_wrong_option_is_named_at_once(plain: LLM) -> None:
    params = SamplingParams(
        max_tokens=4,
        repetition_penalty=0,
        logprobs=21,
        prompt_logprobs=-1,
        frequency_penalty=3,
        presence_penalty=float("nan"),
        logit_bias={-1: 2.0},
        min_tokens=5,
        bad_words=[" "],
        bad_words_ids=[[]],
    )
    with pytest.raises(RequestError) as error:
        plain.generate([5], params)
    assert [problem.option for problem in error.value.problems] == [
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "bad_words",
        "bad_words_ids",
    ]


def test_what_the_model_or_the_tables_cannot_hold_is_refused(plain: LLM) -> None:
    vocab = plain.engine.runner.config.vocab_size
    cases: list[tuple[dict[str, Any], str]] = [
        ({"logit_bias": {vocab: 1.0}}, "logit_bias"),
        ({"bad_words_ids": [[5, vocab]]}, "bad_words_ids"),
        ({"min_tokens": 2, "stop_token_ids": [vocab]}, "stop_token_ids"),
        ({"stop_token_ids": [5, 10**6]}, "stop_token_ids"),
        ({"bad_words_ids": [[5] * 33]}, "bad_words"),
        ({"bad_words_ids": [[token] for token in range(vocab)]}, "bad_words"),
        ({"bad_words_ids": [[5, 6 + i // 250, i % 250] for i in range(513)]}, "bad_words"),
    ]
    for options, option in cases:
        with pytest.raises(RequestError) as error:
            plain.generate([5], SamplingParams(max_tokens=4, **options))
        assert [problem.option for problem in error.value.problems] == [option]
