"""Plain decoding through the engine against transformers' own generate, and failures of single requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.builders import tiny_llama_dir
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.engine.chain_attention import TorchDecodeAttention
from trtllm_tree.engine.engine import Engine
from trtllm_tree.engine.kv_cache import CacheGroup, GroupSpec, KVCache
from trtllm_tree.engine.model_runner import ModelRunner, load_model_config, target_layer_specs
from trtllm_tree.engine.plain import PlainDecode
from trtllm_tree.engine.request import Request
from trtllm_tree.errors import RequestError, UnsupportedError
from trtllm_tree.sampling.edits import LogitEdits
from trtllm_tree.sampling.gumbel import SlotDraws
from trtllm_tree.sampling.logprobs import TargetLogprobs

EOS = 2
NUM_TOKENS = 24


def _prompts(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, 300, (length,), generator=generator).tolist() for length in (1, 3, 16, 17, 33, 70)
    ]


@pytest.fixture(scope="module")
def runner(tiny_target: Path, device: str) -> ModelRunner:
    return ModelRunner(tiny_target, dtype=torch.float32, device=torch.device(device))


@pytest.fixture(scope="module")
def expected(tiny_target: Path) -> list[list[int]]:
    """What transformers generates greedily for `_prompts()`, one prompt at a time, end tokens ignored."""
    return [_transformers_tokens(tiny_target, prompt, NUM_TOKENS, eos=None) for prompt in _prompts()]


def _transformers_tokens(
    model_dir: Path, prompt: list[int], num_tokens: int, *, eos: int | None
) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = eos
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def _engine(
    runner: ModelRunner,
    *,
    page_size: int = 16,
    max_num_tokens: int = 64,
    max_batch_size: int = 8,
    max_seq_len: int = 160,
    num_pages: int = 80,
) -> Engine:
    cache = KVCache(
        [
            CacheGroup(
                GroupSpec("target", target_layer_specs(runner.config)),
                num_pages=num_pages + 1,
                page_size=page_size,
                num_slots=max_batch_size + 1,
                max_pages=-(-max_seq_len // page_size),
                dtype=runner.dtype,
                device=runner.device,
            )
        ]
    )
    draws = SlotDraws(max_batch_size + 1, max_batch_size, device=runner.device)
    edits = LogitEdits(max_batch_size + 1, max_batch_size, runner.config.vocab_size, device=runner.device)
    logprobs = TargetLogprobs(edits)
    return Engine(
        runner,
        cache,
        PlainDecode(max_batch_size + 1, runner.device, TorchDecodeAttention(), draws, edits, logprobs),
        draws,
        edits,
        logprobs,
        tokenizer=None,
        eos_ids=[EOS],
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
    )


def _params(max_tokens: int = NUM_TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def _run(engine: Engine) -> None:
    for _ in range(2000):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def _tokens(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output.token_ids for request in requests]


def _num_free(engine: Engine) -> list[int]:
    return [group.allocator.num_free for group in engine.cache.groups]


@pytest.mark.parametrize(
    ("page_size", "max_num_tokens"), [(16, 5), (16, 64), (32, 7), (32, 64), (64, 5), (64, 7)]
)
def test_a_batch_decodes_as_transformers_does_one_by_one(
    runner: ModelRunner, expected: list[list[int]], page_size: int, max_num_tokens: int
) -> None:
    engine = _engine(runner, page_size=page_size, max_num_tokens=max_num_tokens)
    before = _num_free(engine)
    requests = [engine.add_request(prompt, _params()) for prompt in _prompts()]
    _run(engine)
    assert _tokens(requests) == expected
    assert {request.finish_reason for request in requests} == {"length"}
    assert all(request.accept_lens == [1] * (NUM_TOKENS - 1) for request in requests)
    assert _num_free(engine) == before


def test_a_request_ends_where_transformers_ends_it(tiny_target: Path, runner: ModelRunner) -> None:
    """The end token is the last one that this prompt's output has not shown before."""
    prompt = _prompts()[3]
    free = _transformers_tokens(tiny_target, prompt, NUM_TOKENS, eos=None)
    eos = next(token for index, token in reversed(list(enumerate(free))) if token not in free[:index])
    stopped = _transformers_tokens(tiny_target, prompt, NUM_TOKENS, eos=eos)
    assert len(stopped) > 1 and stopped[-1] == eos
    engine = _engine(runner)
    request = engine.add_request(prompt, _params(stop_token_ids=[eos]))
    _run(engine)
    assert request.output.token_ids == stopped
    assert (request.finish_reason, request.output.stop_reason) == ("stop", eos)


def test_requests_that_come_and_go_at_different_steps_do_not_touch_each_other(
    runner: ModelRunner, expected: list[list[int]]
) -> None:
    engine = _engine(runner, max_batch_size=3, max_num_tokens=9)
    lengths = [3, 24, 1, 9, 17, 5]
    requests = []
    for prompt, max_tokens in zip(_prompts(), lengths, strict=True):
        requests.append(engine.add_request(prompt, _params(max_tokens)))
        for _ in range(2):
            engine.step()
    _run(engine)
    assert _tokens(requests) == [tokens[:n] for tokens, n in zip(expected, lengths, strict=True)]


def test_requests_wait_for_a_pool_that_is_too_small_for_all_of_them(
    runner: ModelRunner, expected: list[list[int]]
) -> None:
    engine = _engine(runner, num_pages=7)
    requests = [engine.add_request(prompt, _params()) for prompt in _prompts()]
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, 7 - _num_free(engine)[0])
    assert most > 4
    assert _tokens(requests) == expected
    assert _num_free(engine) == [7]


def test_a_request_of_the_whole_pool_and_the_whole_length_is_served(runner: ModelRunner) -> None:
    engine = _engine(runner, num_pages=10, max_seq_len=160)
    request = engine.add_request(_prompts()[4], _params(160 - 33))
    _run(engine)
    assert len(request.output.token_ids) == 127
    assert request.finish_reason == "length"


def test_steps_report_the_requests_that_changed(runner: ModelRunner) -> None:
    engine = _engine(runner, max_num_tokens=10)
    short = engine.add_request([5, 6, 7], _params(4))
    long = engine.add_request(_prompts()[3], _params(2))
    # 10 rows: the short prompt and 7 rows of the long one; then turns.
    assert engine.step() == [short]
    assert engine.step() == [short]
    assert engine.step() == [long]
    assert engine.step() == [short, long]
    assert long.finish_reason == "length"
    assert engine.step() == [short]
    assert short.finish_reason == "length"
    assert engine.step() == [] and not engine.has_work


# Requests that cannot be served.


def _options(engine: Engine, prompt: list[Any], params: SamplingParams) -> list[str]:
    with pytest.raises(RequestError) as caught:
        engine.add_request(prompt, params)
    assert all(problem.rule and problem.remedy for problem in caught.value.problems)
    return sorted(problem.option for problem in caught.value.problems)


def test_every_reason_is_named_at_once(runner: ModelRunner) -> None:
    engine = _engine(runner)
    bad = _params(200, temperature=-0.7, n=2)
    assert _options(engine, [5, 300, -1], bad) == ["max_tokens", "n", "prompt", "temperature"]
    assert _options(engine, [], _params(temperature=-1.0)) == ["prompt", "temperature"]
    assert not engine.has_work


@pytest.mark.parametrize("prompt", [[5, 300], [-1], [5, "6"], [1.5], [None]])
def test_token_ids_outside_the_vocabulary_are_refused(runner: ModelRunner, prompt: list[Any]) -> None:
    assert _options(_engine(runner), prompt, _params()) == ["prompt"]


@pytest.mark.parametrize("max_tokens", [0, -3, None, "8", 2.0])
def test_a_budget_that_is_no_positive_integer_is_refused(runner: ModelRunner, max_tokens: Any) -> None:
    engine = _engine(runner)
    assert _options(engine, [5], _params(max_tokens)) == ["max_tokens"]
    assert _options(engine, [5, 300], _params(max_tokens)) == ["max_tokens", "prompt"]


def test_a_request_longer_than_max_seq_len_is_refused(runner: ModelRunner) -> None:
    engine = _engine(runner, max_seq_len=40)
    assert _options(engine, [5] * 20, _params(21)) == ["max_tokens"]
    engine.add_request([5] * 20, _params(20))


def test_a_request_larger_than_the_pool_is_refused(runner: ModelRunner) -> None:
    engine = _engine(runner, num_pages=3)
    with pytest.raises(RequestError, match=r"KV pool.*raise kv_cache_tokens"):
        engine.add_request([5] * 20, _params(29))
    engine.add_request([5] * 20, _params(28))


def test_other_requests_go_on_when_one_is_refused(runner: ModelRunner, expected: list[list[int]]) -> None:
    engine = _engine(runner)
    first = engine.add_request(_prompts()[2], _params())
    for _ in range(5):
        engine.step()
    _options(engine, [], _params())
    second = engine.add_request(_prompts()[3], _params())
    _run(engine)
    assert _tokens([first, second]) == expected[2:4]


def test_layers_that_the_engine_cannot_run_are_refused(tiny_target: Path) -> None:
    config = load_model_config(tiny_target)
    config.layer_types = ["full_attention", "sliding_attention", "chunked_attention", "full_attention"]
    config.sliding_window, config.kv_lora_rank = 128, 64
    config.attn_logit_softcapping, config.logit_scale = 50.0, 0.0625
    with pytest.raises(UnsupportedError) as caught:
        target_layer_specs(config)
    assert [problem.option for problem in caught.value.problems] == [
        "model: layer_types",
        "model: sliding_window",
        "model: attn_logit_softcapping",
        "model: logit_scale",
        "model: model_type",
    ]


# Cancelled requests.


def test_an_aborted_request_gives_everything_back_and_keeps_what_it_had(
    runner: ModelRunner, expected: list[list[int]]
) -> None:
    engine = _engine(runner, max_batch_size=2, max_num_tokens=8)
    before = _num_free(engine)
    requests = [engine.add_request(prompt, _params()) for prompt in (*_prompts()[:2], *_prompts()[4:])]
    decoding, other, prefilling, waiting = requests
    for _ in range(6):
        engine.step()
    engine.abort(decoding)
    for _ in range(3):
        engine.step()
    assert 0 < prefilling.committed_len < len(prefilling.prompt_ids) and waiting.slot is None
    engine.abort(prefilling)
    engine.abort(waiting)
    _run(engine)
    assert [r.finish_reason for r in requests] == ["cancelled", "length", "cancelled", "cancelled"]
    assert (
        decoding.output.token_ids and decoding.output.token_ids == expected[0][: len(_tokens([decoding])[0])]
    )
    assert other.output.token_ids == expected[1]
    assert _num_free(engine) == before


def test_aborting_a_finished_request_changes_nothing(runner: ModelRunner) -> None:
    engine = _engine(runner)
    before = _num_free(engine)
    request = engine.add_request([5], _params(1))
    _run(engine)
    engine.abort(request)
    assert request.finish_reason == "length"
    assert _num_free(engine) == before


# Logits that are not numbers.


def test_a_poisoned_prompt_ends_its_own_request_alone(
    device: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The embedding row of a token that only one prompt contains is NaN."""
    model_dir = tiny_llama_dir(tmp_path_factory.mktemp("untied"), tie_embeddings=False, num_layers=2)
    poison = 7
    prompts = [[token for token in prompt if token != poison] for prompt in _prompts()[1:4]]
    clean = [_transformers_tokens(model_dir, prompt, NUM_TOKENS, eos=None) for prompt in prompts]
    assert not any(poison in tokens for tokens in clean)
    runner = ModelRunner(model_dir, dtype=torch.float32, device=torch.device(device))
    runner.embed_tokens.weight[poison] = torch.nan
    engine = _engine(runner, max_num_tokens=7, num_pages=12)
    before = _num_free(engine)
    others = [engine.add_request(prompt, _params()) for prompt in prompts]
    bad = engine.add_request([9, 8, poison, 10, 11], _params())
    _run(engine)
    assert bad.finish_reason == "error"
    assert bad.error is not None and bad.error.problems[0].option == "logits"
    assert bad.output.token_ids == []
    assert _tokens(others) == clean
    assert _num_free(engine) == before

    # The pages that hold NaN now serve others.
    again = [engine.add_request(prompt, _params()) for prompt in prompts * 2]
    _run(engine)
    assert _tokens(again) == clean * 2


@pytest.mark.parametrize("step", [1, 6])
def test_logits_that_turn_nan_end_one_request_behind_its_last_good_token(
    runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    engine = _engine(runner)
    requests = [engine.add_request(prompt, _params()) for prompt in _prompts()[:4]]
    forward = ModelRunner.forward
    decodes = []

    def poisoned(self: ModelRunner, batch: Any, cache: KVCache) -> torch.Tensor:
        logits = forward(self, batch, cache)
        if batch.logit_rows is None:
            decodes.append(batch)
            if len(decodes) == step:
                logits[2, 17] = torch.nan
        return logits

    monkeypatch.setattr(ModelRunner, "forward", poisoned)
    _run(engine)
    assert [request.finish_reason for request in requests] == ["length", "length", "error", "length"]
    good = expected[2][:step]
    assert _tokens(requests) == [expected[0], expected[1], good, expected[3]]
    assert str(requests[2].error).count(f"output token {len(good)}") == 1
    assert all(request.error is None for request in requests if request is not requests[2])
