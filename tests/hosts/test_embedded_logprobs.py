"""Log-probabilities through the embedded engine: one entry a token, from the row of its parent node, cut with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hosts.embedded_engine import CHAIN, MAIN, Build, Sizes, Truths, greedy, prompts_of
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from trtllm_tree import LLM, RequestOutput, SamplingParams
from trtllm_tree.outputs import Logprob, TokenLogprobs

NUM_TOKENS = 18
# By request of a batch: the numbers of likeliest tokens, and what changes the logits that tokens are chosen by.
OPTIONS: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"logprobs": 20, "temperature": 1.3, "seed": 5},
    {},
    {"logprobs": 1, "repetition_penalty": 1.8, "logit_bias": {40: 3.0}},
    {"prompt_logprobs": 0},
    {"logprobs": 6, "frequency_penalty": 1.5, "temperature": 0.8, "top_k": 9, "seed": 6},
    {"logprobs": 2, "prompt_logprobs": 20},
]


@pytest.fixture(scope="module")
def model(tiny_target: Path, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    return model.to(device)


@pytest.fixture(scope="module")
def params() -> list[SamplingParams]:
    return [greedy(NUM_TOKENS, **options) for options in OPTIONS]


@pytest.fixture(scope="module")
def wanted(plain: LLM, truths: Truths, params: list[SamplingParams]) -> list[RequestOutput]:
    """Plain decoding, each request alone."""
    return [plain.generate(*pair) for pair in zip(prompts_of(truths), params, strict=True)]


def expected(model: Any, ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Of every token of `ids` but the first, by transformers' logits: a sort of each row, in float64."""
    with torch.inference_mode():
        rows = model(torch.tensor([ids], device=model.device)).logits[0].double().tolist()
    entries = []
    for row, token in zip(rows, ids[1:], strict=False):
        total = math.log(math.fsum(math.exp(value) for value in row))
        order = sorted(range(len(row)), key=lambda id_: -row[id_])
        picked = [token, *order[:num_top]]
        entries.append({id_: Logprob(row[id_] - total, order.index(id_) + 1) for id_ in picked})
    return entries


def assert_same(got: list[TokenLogprobs], want: list[TokenLogprobs]) -> None:
    """The same tokens, values and ranks; two that tie to a thousandth may have changed places."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert len(one) == len(other) and next(iter(one)) == next(iter(other)), "another token was chosen"
        values = [each.logprob for each in one.values()]
        assert values == pytest.approx([each.logprob for each in other.values()], abs=1e-3)
        for token in one.keys() | other.keys():
            # What only one side has ties with the last that the other has.
            found, true = (
                side[token].logprob if token in side else list(side.values())[-1].logprob
                for side in (one, other)
            )
            assert found == pytest.approx(true, abs=1e-3), token
        ranks = zip(one.values(), other.values(), strict=True)
        assert all(abs(a.rank - b.rank) <= 1 for a, b in ranks)
        assert [each.rank for each in [*one.values()][1:]] == sorted(
            each.rank for each in [*one.values()][1:]
        )


def assert_as_plain(got: RequestOutput, want: RequestOutput) -> None:
    one, other = got.outputs[0], want.outputs[0]
    assert one.token_ids == other.token_ids
    assert (one.logprobs is None, got.prompt_logprobs is None) == (
        other.logprobs is None,
        want.prompt_logprobs is None,
    )
    assert_same(one.logprobs or [], other.logprobs or [])
    assert_same((got.prompt_logprobs or [])[1:], (want.prompt_logprobs or [])[1:])  # type: ignore[arg-type]
    assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_plain_decoding_returns_what_transformers_says(
    model: Any, truths: Truths, params: list[SamplingParams], wanted: list[RequestOutput]
) -> None:
    for prompt, param, output in zip(prompts_of(truths), params, wanted, strict=True):
        completion = output.outputs[0]
        ids = [*prompt, *completion.token_ids]
        if param.logprobs is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
        else:
            want = expected(model, ids, param.logprobs)[len(prompt) - 1 :]
            assert completion.logprobs is not None
            assert_same(completion.logprobs, want)
            chosen = [entry[token].logprob for token, entry in zip(completion.token_ids, want, strict=True)]
            assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-3)
        if param.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
            rest = [entry for entry in output.prompt_logprobs[1:] if entry is not None]
            assert_same(rest, expected(model, list(prompt), param.prompt_logprobs))


@pytest.mark.parametrize("sizes", [None, CHAIN, MAIN, (3, 4, 20)], ids=str)
def test_plain_chain_and_tree_return_the_same_in_a_mixed_batch_and_in_chunks(
    build: Build,
    tiny_target: Path,
    device: str,
    truths: Truths,
    params: list[SamplingParams],
    wanted: list[RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes | None,
) -> None:
    options: dict[str, Any] = {"max_num_tokens": 13, "max_batch_size": 5}
    if sizes is None:
        llm = LLM(str(tiny_target), device=device, dtype="float32", max_seq_len=256, **options)
    else:
        llm = build(sizes, **options)
        known = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in wanted}
        KnownContinuation(llm, known, monkeypatch)
    log = None if sizes is None else RoundLog(llm)
    outputs = llm.generate(prompts_of(truths), params)
    if log is not None and sizes is not None:
        assert max(log.accept_lens) >= 4 and log.has_moved_rows == (sizes[0] > 1)
    for got, want in zip(outputs, wanted, strict=True):
        assert_as_plain(got, want)


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
@pytest.mark.parametrize("reason", ["token", "string", "length", "min_tokens"])
def test_an_end_inside_an_accepted_path_cuts_logprobs_with_ids_text_and_usage(
    build: Build, plain: LLM, monkeypatch: pytest.MonkeyPatch, sizes: Sizes, reason: str
) -> None:
    """An output of nothing but x, y and z, whose drafts are always right."""
    prompt = [7, 8, 9]
    xyz = [plain.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "xyz"]
    # Among three letters, none of them again before the others.
    options: dict[str, Any] = {
        "logit_bias": dict.fromkeys(xyz, 60.0),
        "bad_words_ids": [[a, b] for a in xyz for b in xyz if (xyz.index(b) - xyz.index(a)) % 3 != 1],
    }
    free = plain.generate(prompt, greedy(14, logprobs=2, **options))
    ids, text = free.outputs[0].token_ids, free.outputs[0].text
    assert text in "xyz" * 6 and len(text) == len(ids) == 14
    ends: dict[str, tuple[dict[str, Any], int, str, Any]] = {
        "token": ({"stop_token_ids": [ids[2]]}, 3, "stop", ids[2]),
        "string": ({"stop": text[1:4]}, 4, "stop", text[1:4]),
        "length": ({"max_tokens": 4}, 4, "length", None),
        "min_tokens": ({"stop": text[:2], "min_tokens": 6}, 8, "stop", text[:2]),
    }
    end, length, why, stop = ends[reason]
    params = greedy(**{"max_tokens": 14, "logprobs": 2} | options | end)
    llm = build(sizes)
    for seed in range(50):
        KnownContinuation(llm, {tuple(prompt): ids}, monkeypatch, hit_rate=1.0, seed=seed)
        log = RoundLog(llm)
        output = llm.generate(prompt, params)
        monkeypatch.undo()
        if 1 + sum(log.accept_lens) > length:
            break
    else:
        raise AssertionError("no path went on behind the end")
    completion = output.outputs[0]
    assert completion.token_ids == ids[:length] and completion.length == length
    assert (completion.finish_reason, completion.stop_reason) == (why, stop)
    shown = {"token": length - 1, "string": length - 3, "length": length, "min_tokens": length - 2}[reason]
    assert completion.text == text[:shown]
    assert completion.logprobs is not None and free.outputs[0].logprobs is not None
    assert_same(completion.logprobs, free.outputs[0].logprobs[:length])
    assert 1 + sum(output.acceptance.accept_lens) == length
    streamed = list(llm.stream(prompt, params))
    diffs = [entry for update in streamed for entry in update.outputs[0].logprobs_diff or []]
    assert_same(diffs, completion.logprobs)
    assert streamed[-1].outputs[0].cumulative_logprob == pytest.approx(completion.cumulative_logprob)
