"""`LLM(host="tensorrt_llm")` over the runtime double: what is translated, and what is refused by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import trtllm_tree
from tests.builders import tiny_eagle3_dir
from tests.doubles.tensorrt_llm.install import runtime_double
from tests.hosts.tensorrt_llm.mtp_runs import glm_dir
from tests.hosts.tensorrt_llm.tree_runs import tree_double
from trtllm_tree import LLM, ConfigError, HostUnavailableError, RequestError, SamplingParams, config
from trtllm_tree.hosts.tensorrt_llm import llm as front
from trtllm_tree.hosts.tensorrt_llm import plugin

_CLASSES = "trtllm_tree.hosts.tensorrt_llm.config"
TREE = {"tree_topk": 2, "num_steps": 3, "num_nodes": 6}
# The double's defaults are sized for its own tests.
OPTIONS: dict[str, Any] = {
    "host": "tensorrt_llm",
    "dtype": "float32",
    "max_seq_len": 128,
    "disable_overlap_scheduler": True,
}


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """TensorRT-LLM, not yet imported; what an LLM sets in this process is put back."""
    for name in ("TLLM_TREE_ENABLE", "TLLM_TREE_VERIFY", "TLLM_FMHA_LIBS"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    sys.modules.pop(_CLASSES, None)
    with tree_double(tmp_path / "double", "new", monkeypatch):
        for name in ("TLLM_TREE_ENABLE", "TLLM_FMHA_LIBS"):
            monkeypatch.delenv(name, raising=False)
        yield lambda: import_module("tensorrt_llm")
    sys.modules.pop(_CLASSES, None)
    os.environ.clear()
    os.environ.update(before)


def spec_of(head: Path, **sizes: Any) -> config.SpeculativeConfig:
    return config.SpeculativeConfig(speculative_model=str(head), **sizes)


def params(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def test_where_it_is_not_installed_the_error_says_what_to_do() -> None:
    with pytest.raises(HostUnavailableError, match=r"not installed here.*host='embedded'"):
        LLM("model", host="tensorrt_llm")
    with pytest.raises(ConfigError, match="host = 'vllm': must be one of embedded, tensorrt_llm"):
        LLM("model", host="vllm")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sizes", [None, {"tree_topk": 1, "num_steps": 3}, TREE], ids=["plain", "chain", "tree"]
)
def test_tokens_and_results_are_those_of_the_embedded_host(
    double: Any, tiny_target: Path, tiny_head: Path, sizes: dict[str, int] | None
) -> None:
    spec = None if sizes is None else spec_of(tiny_head, **sizes)
    prompts: list[Any] = ["a quick fox", [5, 9, 23, 77], [{"role": "user", "content": "say a word"}], "abc"]
    requests = [params(), params(7), params(temperature=0.9, seed=5, top_k=20), params(seed=6, top_k=30)]
    # Without a tree TensorRT-LLM draws by itself.
    requests[2:] = requests[2:] if sizes == TREE else [params(), params()]
    with LLM(str(tiny_target), speculative_config=spec, **OPTIONS) as theirs:
        found = theirs.generate(prompts, requests)
        streamed = list(theirs.stream(prompts[0], requests[0]))
    common: dict[str, Any] = {"device": "cpu", "max_seq_len": 128, "dtype": "float32", "cuda_graphs": False}
    with LLM(str(tiny_target), speculative_config=spec, **common) as ours:
        expected = ours.generate(prompts, requests)
    for mine, other in zip(found, expected, strict=True):
        assert mine.outputs == other.outputs
        assert (mine.prompt, mine.prompt_token_ids, mine.finished) == (
            other.prompt,
            other.prompt_token_ids,
            True,
        )
    # In the double whoever is waited for drives all, so that only the first is seen step by step.
    assert found[0].acceptance == expected[0].acceptance
    assert streamed[-1].finished and streamed[-1].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert "".join(update.outputs[0].text_diff for update in streamed) == expected[0].outputs[0].text
    added = [token for update in streamed for token in update.outputs[0].token_ids_diff]
    assert added == expected[0].outputs[0].token_ids
    assert streamed[-1].acceptance == found[0].acceptance


def test_a_tree_switches_the_plugin_on_in_every_process_and_a_chain_does_not(
    double: Any, tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[dict[str, Any]] = []
    monkeypatch.setattr(plugin, "register", lambda **options: registered.append(options))
    with LLM(str(tiny_target), speculative_config=spec_of(tiny_head, tree_topk=1), **OPTIONS) as llm:
        assert llm.remote.llm.args.env_overrides is None
        assert type(llm.remote.llm.args.speculative_config).__name__ == "Eagle3DecodingConfig"
    assert "TLLM_TREE_ENABLE" not in os.environ and registered == []
    spec = spec_of(tiny_head, **TREE, use_rejection_sampling=True)
    with LLM(str(tiny_target), speculative_config=spec, env_overrides={"MINE": "1"}, **OPTIONS) as llm:
        args = llm.remote.llm.args
        assert registered == [{"required": True}]
        assert args.env_overrides == {"TLLM_TREE_ENABLE": "1", "TLLM_FMHA_LIBS": "+trtllm_tree", "MINE": "1"}
        assert args.speculative_config.use_rejection_sampling
        assert llm.remote.llm.executor.model.spec_worker.verify == "rejection"
        assert type(args.speculative_config).__name__ == "TreeEagle3Config"
        assert type(llm.remote.llm.executor.model.spec_worker).__name__ == "TreeEagleWorker"
        assert llm.speculative_config == spec
    assert os.environ["TLLM_TREE_ENABLE"] == "1"


def test_the_targets_mtp_layer_drafts_without_a_head(double: Any, tmp_path: Path) -> None:
    target = str(glm_dir(tmp_path))
    with LLM(target, **OPTIONS) as plain:
        wanted = plain.generate([[5, 9, 23], [7] * 20], params(16))
    spec = config.SpeculativeConfig(decoding_type="MTP", **TREE)  # type: ignore[arg-type]
    with LLM(target, speculative_config=spec, **OPTIONS) as llm:
        executor = llm.remote.llm.executor
        assert type(llm.remote.llm.args.speculative_config).__name__ == "TreeMTPConfig"
        assert type(executor.model.spec_worker).__name__ == "TreeMTPEagleWorker"
        found = llm.generate([[5, 9, 23], [7] * 20], params(16))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in wanted]
    assert max(found[0].acceptance.accept_lens) > 1
    assert front.feature_problems(spec, target) == []
    # A separate checkpoint of MTP layers is no EAGLE3 head either.
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers/config.json").write_text('{"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}', "utf-8")
    apart = config.SpeculativeConfig(decoding_type="MTP", speculative_model=str(tmp_path / "layers"))
    assert front.with_features(apart, target) == apart


def test_a_public_config_made_beside_tensorrt_llm_is_taken_as_it_is(
    double: Any, tiny_target: Path, tiny_head: Path
) -> None:
    double()
    made = trtllm_tree.SpeculativeConfig(speculative_model=str(tiny_head), **TREE)
    assert type(made).__name__ == "TreeEagle3Config"
    with LLM(str(tiny_target), speculative_config=made, **OPTIONS) as llm:
        assert llm.speculative_config == made.plain
        assert len(llm.generate("abc", params()).outputs[0].token_ids) == 12


def test_a_request_that_cannot_be_honoured_fails_alone_and_by_name(
    double: Any, tiny_target: Path, tiny_head: Path
) -> None:
    refused = [
        params(logprobs=2),
        params(repetition_penalty=1.2, min_tokens=3),
        params(temperature=-1),
        params(guided_decoding=trtllm_tree.GuidedDecodingParams(regex="a+")),
    ]
    with LLM(str(tiny_target), speculative_config=spec_of(tiny_head, **TREE), **OPTIONS) as llm:
        outputs = llm.generate(["abc"] * 5, [*refused, params()])
        options = [[problem.option for problem in output.error.problems] for output in outputs[:4]]  # type: ignore[union-attr]
        assert options == [
            ["logprobs"],
            ["repetition_penalty", "min_tokens"],
            ["temperature"],
            ["guided_decoding"],
        ]
        assert outputs[0].outputs[0].finish_reason == "error" and outputs[0].finished
        assert outputs[4].error is None and len(outputs[4].outputs[0].token_ids) == 12
        with pytest.raises(RequestError, match="is not served with host='tensorrt_llm'"):
            llm.generate("abc", params(bad_words=["x"]))
        with pytest.raises(RequestError, match="prompt_logprobs"):
            next(iter(llm.stream("abc", params(prompt_logprobs=1))))


def test_what_is_no_prompt_fails_alone_and_nothing_is_served_after_close(
    double: Any, tiny_target: Path
) -> None:
    options = OPTIONS | {"kv_cache_config": {"max_tokens": 512, "enable_block_reuse": False}}
    with LLM(tiny_target, **options) as llm:
        assert llm.remote.llm.args.kv_cache_config.max_tokens == 512
        prompts: Any = (prompt for prompt in (None, "abc", [{"content": "x"}], {"prompt": "abc"}))
        outputs = llm.generate(prompts, params(4))
        assert [output.error is None for output in outputs] == [False, True, False, True]
        assert outputs[1].outputs == outputs[3].outputs == [llm.generate("abc", params(4)).outputs[0]]
    with pytest.raises(RequestError, match=r"cannot be used after close\(\)"):
        llm.generate("abc")


def test_what_tensorrt_llm_raises_about_a_request_is_that_requests_error(
    double: Any, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny_target), **OPTIONS) as llm:
        begin = llm.remote.llm.generate_async

        def picky(ids: list[int], **options: Any) -> Any:
            if len(ids) == 3:
                raise ValueError("three tokens are too many")
            return begin(ids, **options)

        monkeypatch.setattr(llm.remote.llm, "generate_async", picky)
        outputs = llm.generate([[1, 2, 3], [4, 5]], params(4))
        assert "three tokens are too many" in str(outputs[0].error)
        assert len(outputs[1].outputs[0].token_ids) == 4


def test_a_stream_is_aborted_when_it_is_closed_early_and_only_then(
    double: Any, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny_target), **OPTIONS) as llm:
        begin, begun = llm.remote.llm.generate_async, []

        def noted(*args: Any, **options: Any) -> Any:
            begun.append(begin(*args, **options))
            return begun[-1]

        monkeypatch.setattr(llm.remote.llm, "generate_async", noted)
        stream = llm.stream("abc", params(50))
        next(stream)
        monkeypatch.setattr(begun[0], "abort", lambda: begun.append("aborted"))
        stream.close()
        assert begun[1:] == ["aborted"]
        for _ in llm.stream("abc", params(3)):
            monkeypatch.setattr(begun[2], "abort", lambda: begun.append("aborted"))
        assert len(begun) == 3


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({}, {}),
        # Greedy, whatever the others say.
        ({"temperature": 0.0, "top_p": 0.5, "seed": 3, "top_k": 4}, {}),
        ({"temperature": 0.7, "seed": 3}, {"temperature": 0.7, "top_p": 1.0, "seed": 3}),
        # Without a temperature it is 1 where one of these is given; min_p and a seed alone are greedy.
        ({"top_p": 0.9, "seed": 3}, {"temperature": None, "top_p": 0.9, "seed": 3}),
        ({"top_k": 4, "seed": 3}, {"temperature": None, "top_p": 1.0, "top_k": 4, "seed": 3}),
        ({"top_k": 0, "seed": 3}, {"temperature": None, "top_p": 1.0, "seed": 3}),
        ({"min_p": 0.1, "seed": 3}, {}),
        (
            {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 0},
            {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 0},
        ),
        ({"temperature": 1.0, "top_k": 0, "seed": 1}, {"temperature": 1.0, "top_p": 1.0, "seed": 1}),
        (
            {"repetition_penalty": 1.2, "presence_penalty": 0.0, "min_tokens": 3, "bad_words": ["x"]},
            {"repetition_penalty": 1.2, "min_tokens": 3, "bad": ["x"]},
        ),
    ],
)
def test_sampling_parameters_are_translated(asked: dict[str, Any], given: dict[str, Any]) -> None:
    rest = {
        "max_tokens": 5,
        "stop": ["x"],
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    made = SamplingParams(**{**rest, "stop": "x"}, **asked)  # type: ignore[arg-type]
    assert front.request_problems(made, None) == []
    assert front.sampling_arguments(made) == rest | given


EDITS: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "min_tokens": 3,
    "bad_words": ["x"],
}
# What only the other host has, or nobody translates.
OTHERS: dict[str, Any] = {
    "logit_bias": {3: 1.0},
    "bad_words_ids": [[4]],
    "logprobs": 2,
    "prompt_logprobs": 0,
    "guided_decoding": trtllm_tree.GuidedDecodingParams(regex="a+"),
}


@pytest.mark.parametrize(
    ("speculative", "refused"),
    [
        (None, OTHERS),
        (config.SpeculativeConfig(**TREE), EDITS | OTHERS),
        (config.SpeculativeConfig(tree_topk=1), {"min_p": 0.1} | EDITS | OTHERS),
        (
            config.SpeculativeConfig(tree_topk=1, host_options={"enable_penalty": True}),
            {"min_p": 0.1, "min_tokens": 3, "bad_words": ["x"]} | OTHERS,
        ),
    ],
    ids=["plain", "tree", "chain", "chain that counts"],
)
def test_options_are_refused_only_where_the_run_does_not_serve_them(
    speculative: config.SpeculativeConfig | None, refused: dict[str, Any]
) -> None:
    asked = SamplingParams(temperature=0.7, min_p=0.1, **EDITS, **OTHERS)
    problems = front.request_problems(asked, speculative)
    assert {problem.option for problem in problems} == set(refused)
    assert all("host='tensorrt_llm'" in problem.rule for problem in problems)
    assert front.request_problems(SamplingParams(min_p=0.1), speculative) == []


def test_a_plain_run_passes_edits_on(double: Any, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(tiny_target), **OPTIONS) as llm:
        begin, asked = llm.remote.llm.generate_async, []

        def noted(ids: list[int], *, sampling_params: Any, **options: Any) -> Any:
            asked.append(sampling_params)
            return begin(ids, sampling_params=sampling_params, **options)

        monkeypatch.setattr(llm.remote.llm, "generate_async", noted)
        assert llm.generate("abc", params(4, **EDITS)).error is None
        assert (asked[0].repetition_penalty, asked[0].min_tokens, asked[0].bad) == (1.2, 3, ["x"])


def test_a_sampled_request_without_a_seed_draws_one() -> None:
    seeds = {front.sampling_arguments(SamplingParams(temperature=1.0))["seed"] for _ in range(4)}
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)


def test_only_what_was_given_is_passed_on_under_tensorrt_llms_names() -> None:
    assert front.llm_arguments(front.run_config("m", None, {})) == {"model": "m", "dtype": "auto"}
    options = {
        "max_batch_size": 8,
        "tokens_per_block": 64,
        "kv_cache_dtype": "fp8",
        "kv_cache_tokens": 640,
        "kv_cache_config": {"enable_block_reuse": False},
        "tensor_parallel_size": 2,
        "cuda_graphs": False,
        "env_overrides": {"A": "1"},
    }
    assert front.llm_arguments(front.run_config("m", None, options, dtype="bfloat16")) == {
        "model": "m",
        "dtype": "bfloat16",
        "max_batch_size": 8,
        "kv_cache_config": {
            "tokens_per_block": 64,
            "dtype": "fp8",
            "max_tokens": 640,
            "enable_block_reuse": False,
        },
        "tensor_parallel_size": 2,
        "cuda_graph_config": None,
        "env_overrides": {"A": "1"},
    }


def test_a_file_gives_the_arguments_that_stand_in_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    content = {
        "model": "m",
        "max_batch_size": 8,
        "kv_cache_config": {"dtype": "fp8"},
        "pipeline_parallel_size": 2,
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert front.llm_arguments(config.load_config(path)) == content


def test_a_file_runs_as_it_does_on_the_embedded_host(
    double: Any, tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    section: dict[str, Any] = {
        "decoding_type": "Eagle3",
        "speculative_model": str(tiny_head),
        "max_draft_len": 3,
    }
    section |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 5}
    section = {"max_seq_len": 128, "disable_overlap_scheduler": True, "speculative_config": section}
    path.write_text(
        yaml.safe_dump({"model": str(tiny_target), "dtype": "float32", **section}), encoding="utf-8"
    )
    run, found = config.load_config(path, overrides={"device": "cpu"}), []
    with LLM.from_config(run) as ours:
        found.append(ours.generate("a quick fox", params()).outputs)
    with LLM.from_config(config.load_config(path), host="tensorrt_llm") as theirs:
        assert theirs.remote.llm.args.max_batch_size != run.engine.max_batch_size
        found.append(theirs.generate("a quick fox", params()).outputs)
    assert found[0] == found[1]


def test_names_of_the_demo_are_refused(double: Any) -> None:
    with pytest.raises(ConfigError, match="model = 'demo': only the embedded host knows this name"):
        LLM("demo", host="tensorrt_llm")


def test_every_unknown_or_wrong_option_is_named(double: Any, tiny_target: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("m", host="tensorrt_llm", max_batch=3, max_seq_len=-1)
    assert [problem.option for problem in caught.value.problems] == ["max_batch", "max_seq_len"]
    with pytest.raises(ConfigError) as caught:
        LLM("m", host="tensorrt_llm", device="cpu", pipeline_parallel_size=2, max_beam_width=4,
            speculative_config=config.SpeculativeConfig(**TREE))  # fmt: skip
    options = sorted(problem.option for problem in caught.value.problems)
    assert options == [
        "device",
        "max_beam_width",
        "pipeline_parallel_size",
        "speculative_config.speculative_model",
    ]


@pytest.mark.parametrize(
    ("there", "asked"),
    [
        (None, "+trtllm_tree"),
        ("", "+trtllm_tree"),
        ("+trtllm_tree,-x", "+trtllm_tree,-x"),
        ("-x", "+trtllm_tree,-x"),
        ("a,fallback", "trtllm_tree,a,fallback"),
        ("a,trtllm_tree", "a,trtllm_tree"),
    ],
)
def test_libraries_that_the_user_chose_are_kept(
    monkeypatch: pytest.MonkeyPatch, there: str | None, asked: str
) -> None:
    monkeypatch.delenv("TLLM_FMHA_LIBS", raising=False)
    if there is not None:
        monkeypatch.setenv("TLLM_FMHA_LIBS", there)
    run = front.run_config("m", config.SpeculativeConfig(**TREE, speculative_model="h"), {})
    assert front.run_environment(run) == {"TLLM_TREE_ENABLE": "1", "TLLM_FMHA_LIBS": asked}


def test_a_head_is_given_the_layers_that_it_was_trained_on(tmp_path: Path, tiny_target: Path) -> None:
    head = tiny_eagle3_dir(tmp_path / "head", tiny_target)
    spec = config.SpeculativeConfig(speculative_model=str(head))
    path = head / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    ids = content["eagle_aux_hidden_state_layer_ids"]
    told = front.with_features(spec, str(tiny_target))
    assert told.host_options == {"eagle3_layers_to_capture": {layer - 1 for layer in ids}}
    assert told.is_default_nodes
    (problem,) = front.feature_problems(spec, str(tiny_target))
    assert problem.option == "speculative_config.eagle3_layers_to_capture"
    assert problem.remedy == f"Set eagle3_layers_to_capture to {[layer - 1 for layer in ids]}."
    assert front.feature_problems(told, str(tiny_target)) == []
    chosen = config.SpeculativeConfig(
        speculative_model=str(head), host_options={"eagle3_layers_to_capture": {3}}
    )
    assert front.with_features(chosen, str(tiny_target)) is chosen
    assert front.with_features(spec, "owner/name") is spec
    content["eagle_aux_hidden_state_layer_ids"] = [1]
    path.write_text(json.dumps(content), encoding="utf-8")
    assert front.with_features(spec, str(tiny_target)) is spec


def test_a_version_that_lacks_what_a_tree_needs_is_refused_before_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runtime_double(tmp_path / "double", "new"):
        registry = import_module("tensorrt_llm._torch.attention.backends.fmha.registry")
        monkeypatch.delattr(registry, "FMHA_LIBS")
        monkeypatch.delattr(import_module("tensorrt_llm"), "LLM")
        with pytest.raises(trtllm_tree.UnsupportedError) as caught:
            LLM(
                "m",
                host="tensorrt_llm",
                speculative_config=config.SpeculativeConfig(**TREE, speculative_model="h"),
            )
    options = " ".join(problem.option for problem in caught.value.problems)
    assert "FMHA_LIBS" in options and "tensorrt_llm.LLM" in options
