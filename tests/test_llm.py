"""The Python front: prompts of every kind, parameters per request, streams, errors that name their option."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import tiny_eagle3_dir
from trtllm_tree import LLM, ConfigError, RequestError, SamplingParams, SpeculativeConfig, load_config

CHAT = [{"role": "user", "content": "say a word"}]


@pytest.fixture(scope="module")
def llm(tiny_target: Path, tiny_head: Path, device: str) -> Iterator[LLM]:
    config = SpeculativeConfig(tree_topk=2, num_steps=3, num_nodes=6, speculative_model=str(tiny_head))
    with LLM(
        str(tiny_target), speculative_config=config, device=device, max_seq_len=256, cuda_graphs=False
    ) as llm:
        yield llm


def _params(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def _num_free(llm: LLM) -> list[int]:
    return [group.allocator.num_free for group in llm.engine.cache.groups]


def test_one_prompt_gives_one_output_and_a_list_a_list(llm: LLM) -> None:
    one = llm.generate("a quick fox", _params())
    assert one.prompt == "a quick fox"
    assert one.prompt_token_ids == llm.encode("a quick fox")
    assert one.finished and one.error is None
    completion = one.outputs[0]
    assert (completion.length, completion.finish_reason) == (12, "length")
    assert completion.text == llm.tokenizer.backend_tokenizer.decode(completion.token_ids)
    many = llm.generate(["a quick fox", "jumps"], _params())
    assert [output.prompt for output in many] == ["a quick fox", "jumps"]
    assert many[0].outputs[0].token_ids == completion.token_ids
    assert many[1].outputs[0].token_ids == llm.generate("jumps", _params()).outputs[0].token_ids
    assert llm.generate(["jumps"], _params())[0].outputs == many[1].outputs


def test_text_ids_and_chat_messages_are_prompts_alone_and_in_lists(llm: LLM) -> None:
    chat_text = "<|im_start|>user\nsay a word<|im_end|>\n<|im_start|>assistant\n"
    texts = ["a quick fox", chat_text]
    expected = [output.outputs[0].token_ids for output in llm.generate(texts, _params())]
    ids = [llm.encode(text) for text in texts]
    assert llm.encode(CHAT) == ids[1]
    assert [llm.generate(prompt, _params()).outputs[0].token_ids for prompt in (*ids, CHAT)] == [
        *expected,
        expected[1],
    ]
    mixed = llm.generate([ids[0], CHAT, texts[0], [*CHAT]], _params())
    assert [output.outputs[0].token_ids for output in mixed] == [expected[0], expected[1]] * 2
    assert [output.prompt for output in mixed] == [None, None, texts[0], None]


def test_each_request_has_its_own_parameters(llm: LLM) -> None:
    free = llm.generate("abc", _params()).outputs[0]
    params = [_params(3), _params(stop_token_ids=[free.token_ids[4]]), _params()]
    short, stopped, full = (output.outputs[0] for output in llm.generate(["abc"] * 3, params))
    assert short.token_ids == free.token_ids[:3]
    first = free.token_ids.index(free.token_ids[4])
    assert stopped.token_ids == free.token_ids[: first + 1] and stopped.finish_reason == "stop"
    assert full == free


def test_the_models_own_end_token_ends_the_output_unless_it_is_ignored(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = llm.generate("abc", _params()).outputs[0].token_ids
    monkeypatch.setattr(llm.engine, "_eos_ids", (free[5],))
    first = free.index(free[5])
    ended = llm.generate("abc", SamplingParams(max_tokens=12)).outputs[0]
    assert ended.token_ids == free[: first + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", free[5])
    assert llm.generate("abc", _params()).outputs[0].token_ids == free


def test_default_parameters_generate_the_default_number_of_tokens(llm: LLM) -> None:
    output = llm.generate("abc").outputs[0]
    assert output.length == SamplingParams().max_tokens or output.finish_reason == "stop"


def test_a_wrong_number_of_parameters_names_the_option(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="sampling_params"):
        llm.generate(["a", "b"], [_params()])
    with pytest.raises(ConfigError, match="sampling_params"):
        llm.generate(["a", "b"], [])
    with pytest.raises(ConfigError, match="sampling_params"):
        llm.generate("a", [_params()])


def test_in_a_list_the_request_that_cannot_be_served_fails_alone(llm: LLM) -> None:
    prompts = ["abc", [], [5, 100_000], [5] * 250, "abc", "abc", "abc"]
    params = [_params()] * 4 + [_params(temperature=-0.5), _params(None), _params()]  # type: ignore[arg-type]
    outputs = llm.generate(prompts, params)
    options = [
        [problem.option for problem in output.error.problems] if output.error else [] for output in outputs
    ]
    assert options == [[], ["prompt"], ["prompt"], ["max_tokens"], ["temperature"], ["max_tokens"], []]
    for output, bad in zip(outputs, options, strict=True):
        assert output.finished
        assert output.outputs[0].finish_reason == ("error" if bad else "length")
        assert bool(output.outputs[0].token_ids) == (not bad)
    alone = llm.generate("abc", _params()).outputs[0]
    assert outputs[0].outputs[0] == outputs[6].outputs[0] == alone


@pytest.mark.parametrize(
    ("prompt", "option"), [("", "prompt"), ([-1], "prompt"), ([1, "a"], "prompt"), (None, "prompt")]
)
def test_a_single_prompt_that_cannot_be_served_raises(llm: LLM, prompt: Any, option: str) -> None:
    before = _num_free(llm)
    with pytest.raises(RequestError, match=option):
        llm.generate(prompt, _params())
    with pytest.raises(RequestError, match=option):
        next(llm.stream(prompt, _params()))
    assert not llm.engine.has_work and _num_free(llm) == before


def test_what_is_no_prompt_or_no_parameters_fails_alone_and_the_rest_is_served(llm: LLM) -> None:
    alone = llm.generate("abc", _params()).outputs[0]
    prompts: list[Any] = ["abc", object(), None, [1, "a"], [{"content": "x"}], {"prompt": "abc", "lora": 1}]
    prompts += [5, "abc", "abc", "abc"]
    params: list[Any] = [_params()] * 8 + [None, {"max_tokens": 3}]
    outputs = llm.generate(prompts, params)
    served = [index for index, output in enumerate(outputs) if output.error is None]
    assert served == [0, 7] and all(outputs[index].outputs[0] == alone for index in served)
    options = [output.error.problems[0].option for output in outputs if output.error is not None]
    assert options == ["prompt"] * 3 + ["prompt[0]", "prompt['lora']", "prompt"] + ["sampling_params"] * 2
    assert {output.outputs[0].finish_reason for output in outputs if output.error} == {"error"}
    assert not llm.engine.has_work


def test_dict_prompts_are_served_alone_in_lists_and_streamed(llm: LLM) -> None:
    expected = llm.generate("abc", _params()).outputs[0]
    ids = llm.encode("abc")
    for prompt, text in (({"prompt": "abc"}, "abc"), ({"prompt_token_ids": ids}, None)):
        one = llm.generate(prompt, _params())
        assert (one.prompt, one.prompt_token_ids, one.outputs[0]) == (text, ids, expected)
        (only,) = llm.generate([prompt], _params())
        assert (only.prompt, only.outputs[0]) == (text, expected)
        assert list(llm.stream(prompt, _params()))[-1].outputs[0].token_ids == expected.token_ids


def test_iterables_are_batches_as_lists_are(llm: LLM) -> None:
    expected = [output.outputs[0] for output in llm.generate(["abc", "hello world"], _params())]
    given = llm.generate((text for text in ("abc", "hello world")), (_params() for _ in range(2)))
    assert [output.outputs[0] for output in given] == expected
    assert llm.generate([]) == [] and llm.generate(iter([]), []) == []


@pytest.mark.parametrize("params", [5, "fast", {"max_tokens": 3}])
def test_what_are_no_sampling_parameters_at_all_names_the_option(llm: LLM, params: Any) -> None:
    for prompts in ("abc", ["abc", "d"]):
        with pytest.raises(ConfigError, match=r"sampling_params = .*must be a SamplingParams"):
            llm.generate(prompts, params)
    with pytest.raises(ConfigError, match="sampling_params"):
        next(llm.stream("abc", params))


@pytest.mark.parametrize("options", [{"top_k": 40}, {"top_p": 0.9}, {"top_k": 0}])
def test_top_k_or_top_p_without_a_temperature_draws_at_one(llm: LLM, options: dict[str, Any]) -> None:
    drawn = llm.generate("abc", _params(**options, seed=3)).outputs[0]
    assert drawn == llm.generate("abc", _params(**options, seed=3, temperature=1.0)).outputs[0]
    greedy = llm.generate("abc", _params()).outputs[0]
    assert drawn.token_ids != greedy.token_ids
    assert llm.generate("abc", _params(**options, seed=3, temperature=0)).outputs[0] == greedy
    assert llm.generate("abc", _params(min_p=0.1, seed=3)).outputs[0] == greedy


def test_a_stop_id_that_the_model_does_not_have_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"stop_token_ids = \[1000000\]: token ids must lie in"):
        llm.generate("abc", _params(stop_token_ids=[10**6]))


# Streams.


def _collect(parts: Iterator[Any]) -> tuple[str, list[int], Any]:
    text, ids, last = "", [], None
    for last in parts:
        completion = last.outputs[0]
        text += completion.text_diff
        ids += completion.token_ids_diff
        assert (text, ids) == (completion.text, completion.token_ids)
    return text, ids, last


@pytest.mark.parametrize("stopped", [(), ("hello world",), ("abc", "hello world")])
@pytest.mark.parametrize("include", [False, True])
def test_a_streams_diffs_add_up_to_what_generate_gives(
    llm: LLM, stopped: tuple[str, ...], include: bool
) -> None:
    """The stop strings are pieces of what the model says unasked, across token borders."""
    free = {prompt: llm.generate(prompt, _params(40)).outputs[0].text for prompt in ("hello world", "abc")}
    stops = [free[prompt][9:12] for prompt in stopped]
    params = _params(40, stop=stops or None, include_stop_str_in_output=include)
    for prompt, text in free.items():
        whole = llm.generate(prompt, params).outputs[0]
        streamed, ids, last = _collect(llm.stream(prompt, params))
        assert (streamed, ids) == (whole.text, whole.token_ids)
        ends = [text.index(stop) + len(stop) * include for stop in stops if stop in text]
        assert whole.text == text[: min(ends, default=len(text))]
        reason = "stop" if ends else "length"
        assert last.finished and last.outputs[0].finish_reason == whole.finish_reason == reason
        assert last.acceptance.target_forwards > 0


def test_a_stream_yields_as_tokens_come(llm: LLM) -> None:
    counts = [part.outputs[0].length for part in llm.stream("abc", _params())]
    assert counts[0] == 1 and counts[-1] == 12
    assert counts == sorted(set(counts))


def test_closing_a_stream_cancels_its_request(llm: LLM) -> None:
    before = _num_free(llm)
    stream = llm.stream("abc", _params(100))
    next(stream)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    assert _num_free(llm) == before


def test_two_interleaved_streams_and_a_generate_do_not_disturb_each_other(llm: LLM) -> None:
    expected = [llm.generate(prompt, _params(20)).outputs[0] for prompt in ("abc", "hello world")]
    streams = [llm.stream(prompt, _params(20)) for prompt in ("abc", "hello world")]
    parts: list[list[Any]] = [[], []]
    for round_ in range(3):
        for index, stream in enumerate(streams):
            parts[index].append(next(stream))
        if round_ == 1:
            between = llm.generate("jumps", _params(5)).outputs[0]
    for index, stream in enumerate(streams):
        parts[index] += stream
        text, ids, last = _collect(iter(parts[index]))
        assert (text, ids) == (expected[index].text, expected[index].token_ids)
        assert last.finished
    assert between.token_ids == llm.generate("jumps", _params(5)).outputs[0].token_ids


def test_a_request_that_fails_on_the_way_raises_in_its_stream(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = llm.engine.runner.forward, []

    def poisoned(*args: Any) -> Any:
        logits = forward(*args)
        calls.append(logits)
        return logits.fill_(float("nan")) if len(calls) == 4 else logits

    monkeypatch.setattr(llm.engine.runner, "forward", poisoned)
    seen = []
    with pytest.raises(RequestError, match="logits"):
        seen.extend(llm.stream("abc", _params(30)))
    assert len(seen) == 3 and not any(part.finished for part in seen)
    assert not llm.engine.has_work


# Life.


def test_leaving_the_context_drops_the_engine(tiny_target: Path, device: str) -> None:
    with LLM(str(tiny_target), device=device, max_seq_len=64) as llm:
        assert llm.spec_round is None
        llm.generate("abc", _params(2))
        engine = weakref.ref(llm.engine)
    gc.collect()
    assert engine() is None
    llm.close()
    for use in (lambda: llm.generate("abc"), lambda: llm.generate(["abc"]), lambda: next(llm.stream("abc"))):
        with pytest.raises(RequestError, match=r"cannot be used after close\(\)"):
            use()


def test_an_open_stream_survives_close(tiny_target: Path, device: str) -> None:
    with LLM(str(tiny_target), device=device, max_seq_len=64) as llm:
        expected = llm.generate("abc", _params()).outputs[0].token_ids
        going_on, given_up = llm.stream("abc", _params()), llm.stream("abc", _params())
        next(going_on), next(given_up)
    given_up.close()
    assert list(going_on)[-1].outputs[0].token_ids == expected


def test_a_missing_head_names_the_option(tiny_target: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny_target), speculative_config=SpeculativeConfig())
    assert [problem.option for problem in caught.value.problems] == ["speculative_model"]


def test_a_head_that_is_not_there_names_the_option(tiny_target: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny_target), speculative_config=SpeculativeConfig(speculative_model="no/such/head"))
    assert [(problem.option, problem.value) for problem in caught.value.problems] == [
        ("speculative_model", "no/such/head")
    ]


def test_a_head_of_another_model_is_refused_before_the_target_is_loaded(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tiny_eagle3_dir(tmp_path, tiny_target, config_overrides={"hidden_size": 128})
    monkeypatch.setattr("trtllm_tree.hosts.embedded.host.ModelRunner", None)
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny_target), speculative_config=SpeculativeConfig(speculative_model=str(head)))
    assert any("hidden" in str(problem) for problem in caught.value.problems)


def test_a_model_that_is_not_there_names_the_option() -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("no/such/model")
    assert [problem.option for problem in caught.value.problems] == ["model"]


def test_a_context_beyond_the_models_positions_is_refused(tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="max_seq_len"):
        LLM(str(tiny_target), max_seq_len=4096)


def test_a_yaml_file_gives_the_same_llm(tiny_target: Path, tiny_head: Path, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text(
        f"""
model: {tiny_target}
dtype: float32
max_batch_size: 3
max_num_tokens: 50
max_seq_len: 128
kv_cache_config: {{tokens_per_block: 64, max_tokens: 640}}
speculative_config:
  decoding_type: Eagle3
  speculative_model: {tiny_head}
  max_draft_len: 3
  use_dynamic_tree: true
  dynamic_tree_max_topK: 2
  max_total_draft_tokens: 5
""",
        encoding="utf-8",
    )
    with LLM.from_config(load_config(path)) as other:
        assert other.spec_round is not None and other.spec_round.tree is not None
        assert other.spec_round.num_nodes == 6
        assert other.engine.max_seq_len == 128
        for group in other.engine.cache.groups:
            assert (group.page_size, group.allocator.num_free) == (64, 10)
        prompts = ["abc", "hello world", CHAT]
        ours, theirs = llm.generate(prompts, _params()), other.generate(prompts, _params())
        assert [output.outputs for output in ours] == [output.outputs for output in theirs]


def test_options_of_a_file_that_this_host_cannot_honour_are_all_named(
    tiny_target: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text(
        f"model: {tiny_target}\ntensor_parallel_size: 2\nkv_cache_config: {{dtype: nvfp4}}\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        LLM.from_config(load_config(path))
    assert sorted(problem.option for problem in caught.value.problems) == [
        "kv_cache_config.dtype",
        "tensor_parallel_size",
    ]
