"""Invariant I15: every line of the scope that refuses does so for a config that asks for it, and names itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from trtllm_tree.config import SamplingParams, SpeculativeConfig, host_problems, read_config
from trtllm_tree.config.host_rules import HOSTS, TREE_REFUSALS
from trtllm_tree.errors import Problem, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.llm import request_problems
from trtllm_tree.support.model_facts import ModelFacts, model_facts
from trtllm_tree.support.page import render
from trtllm_tree.support.plan import PlannedRun, run_problems, scope_rows
from trtllm_tree.support.report import Refused, Supported
from trtllm_tree.support.scope import SCOPE, scope_problems

ROOT = Path(__file__).parents[2]
LINES = {line.id: line for line in SCOPE}
# A full-attention model, and what is changed of it.
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}
MLA = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SLIDES = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
# What asks for a line: keys of the file, by section, or of the model's config.json.
FILE_ASKS: dict[str, dict[str, Any]] = {
    "mtp": {"speculative_config": {"decoding_type": "MTP", "speculative_model": None}},
    "multi_depth_mtp": {"speculative_config": {"decoding_type": "MTP", "speculative_model": None}},
    "eagle4": {"speculative_config": {"decoding_type": "Eagle4"}},
    "rejection": {"speculative_config": {"use_rejection_sampling": True}},
    "logit_edits": {"speculative_config": {"enable_penalty": True}},
    "kv_compression": {"kv_cache_compression_config": {"algorithm": "x"}},
    "kv_parallelism": {"context_parallel_size": 2, "cp_config": {"cp_type": "ring"}},
    "kv_other_dtypes": {"kv_cache_config": {"dtype": "nvfp4"}},
    "windowed_cache": {"kv_cache_config": {"max_attention_window": [128]}},
    "structured_output": {"guided_decoding_backend": "xgrammar"},
    "pipeline_parallelism": {"pipeline_parallel_size": 2},
    "disaggregation": {"cache_transceiver_config": {"backend": "UCX"}},
    "attention_dp": {"enable_attention_dp": True},
    "large_trees": {"speculative_config": {"max_total_draft_tokens": 64}},
    "static_trees": {"speculative_config": {"eagle_choices": [[0]]}},
    "tensor_parallelism": {"tensor_parallel_size": 2},
    "sparse_attention": {"sparse_attention_config": {"algorithm": "dsa"}},
    "lora": {"enable_lora": True, "lora_config": {"max_lora_rank": 8}},
    "beam_search": {"max_beam_width": 2},
    "kv_connector": {"kv_connector_config": {"connector": "x"}},
    "acceptance_window": {"speculative_config": {"acceptance_window": 8, "acceptance_rate_window_size": 8}},
    "draft_len_schedule": {"speculative_config": {"draft_len_schedule": {4: 2}, "max_concurrency": 4}},
    "two_model_flow": {"speculative_config": {"eagle3_one_model": False}},
    "relaxed_acceptance": {
        "speculative_config": {
            "decoding_type": "MTP",
            "speculative_model": None,
            "use_relaxed_acceptance_for_thinking": True,
        }
    },
    "suffix_automaton": {"speculative_config": {"sa_config": {"threshold": 3}}},
}
MODEL_ASKS: dict[str, dict[str, Any]] = {
    "recurrent": {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
    },
    "mtp": {"model_type": "glm4_moe", "num_nextn_predict_layers": 1},
    "relaxed_acceptance": {"model_type": "glm4_moe", "num_nextn_predict_layers": 1},
    "multi_depth_mtp": {"model_type": "glm4_moe", "num_nextn_predict_layers": 2},
    "sliding_target": SLIDES,
    "sinks": {"model_type": "gpt_oss"},
    "token_history": {"ngram_sizes": [2, 3]},
    "mla_target": MLA,
    "mrope": {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
    "mla_other_models": MLA | {"model_type": "minicpm3"},
    "mla_quantised": MLA | {"quantization_config": {"quant_method": "fp8"}},
    "mla_sliding": MLA | SLIDES,
    "sliding_by_mask": SLIDES | {"model_type": "phimoe"},
    "other_layers": {"layer_types": ["chunked_attention", "full_attention"]},
    "softcap": {"attn_logit_softcapping": 50.0},
    "logit_options": {"logit_scale": 0.5},
}
# Nothing can ask for these, or what asks is a file of a head or a request, which have tests of their own.
ELSEWHERE = {"sampled", "logprobs", "mla_draft", "mixed_batches", "sliding_lanes"}
# On TensorRT-LLM these are cases of other lines, which block in their place.
CASES = {
    "sliding_by_mask": ["sliding_target"],
    "mla_sliding": ["sliding_target"],
}


def run_of(
    tmp_path: Path, file: dict[str, Any], model: dict[str, Any], host: Any
) -> tuple[PlannedRun, list[Problem]]:
    """A run with a tree, and everything that is wrong with it."""
    section = {
        "decoding_type": "Eagle3",
        "speculative_model": "demo",
        "max_draft_len": 5,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": 20,
    } | file.get("speculative_config", {})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": "demo", **file, "speculative_config": section}))
    config, problems = read_config(path)
    facts = model_facts(MODEL | model)
    draft = model_facts(MODEL)
    run = PlannedRun(config=config, host=host, target=facts, draft=draft, capability=(10, 0))
    return run, problems + host_problems(config, host) + run_problems(run)


def refused(host: Any) -> list[str]:
    return [line.id for line in SCOPE if isinstance(line.answer(host), Refused)]


def test_lines_have_one_name_and_no_two_reasons_for_models_are_alike() -> None:
    assert len(LINES) == len(SCOPE)
    for host in HOSTS:
        reasons = [
            answer.reason for line in SCOPE if line.found and isinstance(answer := line.answer(host), Refused)
        ]
        assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("host", HOSTS)
def test_a_plain_run_asks_for_nothing_that_is_refused(tmp_path: Path, host: Any) -> None:
    run, problems = run_of(tmp_path, {}, {}, host)
    assert problems == []
    verdicts = {row.line.id: row.verdict for row in scope_rows(run, problems)}
    assert {name for name, verdict in verdicts.items() if verdict == "refused"} == set(refused(host))
    assert "blocked" not in verdicts.values()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", sorted({*FILE_ASKS, *MODEL_ASKS}))
def test_a_run_that_asks_for_a_line_is_blocked_by_it_alone_where_it_is_refused(
    tmp_path: Path, name: str, host: Any
) -> None:
    file, model = FILE_ASKS.get(name, {}), MODEL_ASKS.get(name, {})
    run, problems = run_of(tmp_path, file, model, host)
    blocked = [row.line.id for row in scope_rows(run, problems) if row.verdict == "blocked"]
    if name not in refused(host):
        assert problems == []
        return
    assert blocked == (CASES.get(name, [name]) if host == "tensorrt_llm" else [name])
    assert problems and all(problem.remedy for problem in problems)


@pytest.mark.parametrize("host", HOSTS)
def test_every_refused_line_has_a_case_here(host: Any) -> None:
    assert set(refused(host)) <= {*FILE_ASKS, *MODEL_ASKS} | ELSEWHERE


def test_sampling_is_served_by_both_hosts_and_edits_by_one() -> None:
    edited = SamplingParams(temperature=0.7, frequency_penalty=1.0)
    assert edited.validate() == []
    assert [problem.option for problem in request_problems(edited, SpeculativeConfig())] == [
        "frequency_penalty"
    ]
    assert isinstance(LINES["sampled"].embedded, Supported)
    assert isinstance(LINES["sampled"].tensorrt_llm, Supported)
    assert isinstance(LINES["logit_edits"].embedded, Supported)


def test_a_verify_mode_that_contradicts_the_config_is_blocked_by_the_line_of_rejection(
    tmp_path: Path,
) -> None:
    file = FILE_ASKS["rejection"] | {"env_overrides": {"TLLM_TREE_VERIFY": "greedy"}}
    run, problems = run_of(tmp_path, file, {}, "tensorrt_llm")
    blocked = [row.line.id for row in scope_rows(run, problems) if row.verdict == "blocked"]
    assert blocked == ["rejection"] and "use_rejection_sampling" in problems[0].rule


def test_latent_drafts_are_refused_on_tensorrt_llm_for_heads_and_for_mtp_layers() -> None:
    answer = LINES["mla_draft"].tensorrt_llm
    assert isinstance(answer, Refused)
    assert (
        "EAGLE3 head has grouped heads" in answer.reason and "stores a drafter's latent rows" in answer.reason
    )


def test_every_key_that_a_tree_does_not_go_with_is_a_line() -> None:
    for key in TREE_REFUSALS:
        owners = [line.id for line in SCOPE if line.owns(Problem(key, 1, "", ""))]
        assert len(owners) == 1, f"{key}: {owners}"


def test_five_blockers_come_in_one_report(tmp_path: Path) -> None:
    file = {"enable_lora": True, "guided_decoding_backend": "xgrammar", "kv_cache_config": {"dtype": "nvfp4"}}
    model = {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 8}
    run, problems = run_of(tmp_path, file, model, "tensorrt_llm")
    run = replace(run, capability=(7, 5))
    problems += [problem for problem in run_problems(run) if "backend" in problem.option]
    blocked = {row.line.id for row in scope_rows(run, problems) if row.verdict == "blocked"}
    assert blocked == {"lora", "structured_output", "kv_other_dtypes", "recurrent", "sliding_target", "gqa"}
    report = str(UnsupportedError(problems)).splitlines()
    assert len(report) == len(problems) == 7
    for words in (
        "enable_lora",
        "guided_decoding_backend",
        "nvfp4",
        "recurrent",
        "sliding_window",
        "verify",
        "lanes",
    ):
        assert sum(words in line for line in report) >= 1, words


def test_two_kinds_of_layers_are_two_problems(tmp_path: Path) -> None:
    facts = model_facts(MODEL | {"layer_types": ["linear_attention", "chunked_attention"]})
    assert [problem.value for problem in scope_problems(facts, "embedded")] == [
        ["linear_attention"],
        ["chunked_attention"],
    ]


def test_a_chain_on_tensorrt_llm_is_not_judged_and_on_the_embedded_host_only_by_its_model(
    tmp_path: Path,
) -> None:
    chain = {"speculative_config": {"use_dynamic_tree": False, "dynamic_tree_max_topK": None,
                                    "max_total_draft_tokens": 5}}  # fmt: skip
    for host, count in (("tensorrt_llm", 0), ("embedded", 1)):
        _, problems = run_of(tmp_path, chain, MODEL_ASKS["recurrent"], host)
        assert len(problems) == count


CONFIGS = {
    "llama": lambda sizes: transformers.LlamaConfig(**sizes),
    "gemma3": lambda sizes: transformers.Gemma3TextConfig(**sizes),
    "gemma2": lambda sizes: transformers.Gemma2Config(**sizes),
    "gpt_oss": lambda sizes: transformers.GptOssConfig(**sizes),
    "mistral": lambda sizes: transformers.MistralConfig(**sizes),
    "qwen3": lambda sizes: transformers.Qwen3Config(**sizes),
    "cohere": lambda sizes: transformers.CohereConfig(**sizes),
    "phimoe": lambda sizes: transformers.PhimoeConfig(**sizes, sliding_window=8),
    "deepseek_v3": lambda sizes: transformers.DeepseekV3Config(**sizes),
    "deepseek_v2": lambda sizes: transformers.DeepseekV2Config(**sizes),
    "qwen3_next": lambda sizes: transformers.Qwen3NextConfig(**sizes),
    "llama4": lambda sizes: transformers.Llama4TextConfig(**sizes),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_check_refuses_the_models_that_the_engine_refuses_by_the_same_options(name: str) -> None:
    from trtllm_tree.engine.model_runner import target_layer_specs

    config = CONFIGS[name](
        {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    )
    try:
        target_layer_specs(config)
        engine = set()
    except UnsupportedError as error:
        engine = {problem.option for problem in error.problems}
    facts = model_facts(json.loads(config.to_json_string()))
    assert {problem.option for problem in scope_problems(facts, "embedded")} == engine


def test_unknown_models_leave_backends_unasked(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, {}, {}, "embedded")
    assert run_problems(replace(run, target=None)) == []
    unknown: ModelFacts = model_facts({})
    assert run.shape(unknown, (9, 0)) is None


def test_a_model_that_no_leaf_can_serve_blocks_with_the_reasons_of_each(tmp_path: Path) -> None:
    file = {"dtype": "float32", "kv_cache_config": {"dtype": "fp8"}}
    run, problems = run_of(tmp_path, file, MLA, "embedded")
    assert [problem.option for problem in problems] == ["verify attention backend", "lanes attention backend"]
    for words in ("triton: ", "reference: ", "16-bit dtype"):
        assert words in problems[0].rule
    assert run_problems(replace(run, capability=None)) == []


def test_the_page_is_what_the_data_says() -> None:
    page = (ROOT / "docs/support.md").read_text(encoding="utf-8")
    assert page == render(), "docs/support.md is stale: run `make docs`"


def test_the_page_has_every_line_and_links_files_that_are_there() -> None:
    page = render()
    for line in SCOPE:
        assert f"| {line.what} |" in page
        path = line.checked.partition(",")[0]
        if path.endswith(".py"):
            assert (ROOT / "trtllm_tree" / path).is_file(), path
        yes = isinstance(line.embedded, Supported)
        assert f"| {line.what} | {'yes' if yes else f'no: {line.embedded.reason}'} |" in page
