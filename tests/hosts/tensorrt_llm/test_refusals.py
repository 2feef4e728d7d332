"""What a rank sees of a run, and everything in it that trees do not go with: each by name, and many in one report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.mtp_models import tiny_mtp_dir
from trtllm_tree.config.host_rules import TREE_REFUSALS
from trtllm_tree.errors import Problem, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.refusals import guided_decoding_refusal, refusals, runtime_refusals
from trtllm_tree.support.scope import SCOPE

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
MLA = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SM90, SM100 = (9, 0), (10, 0)


def model_config(pretrained: dict[str, Any] | None = None, **fields: Any) -> Any:
    """As TensorRT-LLM's ModelConfig, as far as it is read."""
    found = LLAMA | (pretrained or {})
    defaults: dict[str, Any] = {
        "pretrained_config": SimpleNamespace(to_dict=lambda: found, name_or_path=fields.pop("path", "")),
        "quant_config": SimpleNamespace(kv_cache_quant_algo=None),
        "attn_backend": "TRTLLM",
        "lora_config": None,
        "sparse_attention_config": None,
    }
    return SimpleNamespace(**defaults | fields)


def spec_config(**fields: Any) -> Any:
    """As its Eagle3DecodingConfig after validation, with what newer and older versions have."""
    defaults: dict[str, Any] = {
        "decoding_type": "Eagle3",
        "max_draft_len": 5,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": 20,
        "speculative_model": "owner/head",
        "num_eagle_layers": 5,
        "eagle3_one_model": True,
        "use_rejection_sampling": False,
    }
    return SimpleNamespace(**defaults | fields)


def mapping(**sizes: Any) -> Any:
    defaults = {"tp_size": 1, "pp_size": 1, "cp_size": 1, "enable_attention_dp": False}
    return SimpleNamespace(**defaults | sizes)


def found(
    model: Any = None, spec: Any = None, ranks: Any = None, *, capability: Any = SM90, verify: str = "gumbel"
) -> list[Problem]:
    parts = (model or model_config(), spec or spec_config(), ranks or mapping())
    return refusals(*parts, verify=verify, capability=capability)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_TREE_ENABLE", "1")
    monkeypatch.setenv("TLLM_FMHA_LIBS", "trtllm_tree,fallback")
    monkeypatch.delenv("TLLM_TREE_VERIFY", raising=False)


@pytest.mark.parametrize("capability", [None, SM90, SM100, (10, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_what_can_run_is_not_refused(capability: Any, ranks: int) -> None:
    assert found(ranks=mapping(tp_size=ranks), capability=capability) == []
    fp8 = model_config(quant_config=SimpleNamespace(kv_cache_quant_algo="FP8"))
    assert found(fp8, capability=capability) == []
    assert found(spec=spec_config(use_rejection_sampling=True), verify="rejection") == []
    assert found(model_config(MLA), capability=capability) == []
    assert found(model_config({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"})) == []
    # Validators of TensorRT-LLM set these.
    assert found(spec=spec_config(max_batch_size=8, num_eagle_layers=5)) == []


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "sliding_target": (
        {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
        "model: sliding_window",
    ),
    "sinks": ({"model_type": "gpt_oss"}, "model: model_type"),
    "other_layers": ({"layer_types": ["chunked_attention", "full_attention"]}, "model: layer_types"),
    "recurrent": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        "model: layer_types",
    ),
    "mrope": ({"rope_scaling": {"mrope_section": [16, 24, 24]}}, "model: mrope_section"),
    "softcap": ({"attn_logit_softcapping": 50.0}, "model: attn_logit_softcapping"),
    "token_history": ({"ngram_sizes": [2]}, "model: ngram_sizes"),
}


@pytest.mark.parametrize("line", MODELS)
def test_a_target_is_refused_by_the_rules_of_the_scope(line: str) -> None:
    changes, option = MODELS[line]
    (problem,) = found(model_config(changes))
    (mine,) = (each for each in SCOPE if each.id == line)
    assert problem.option == option and problem.remedy
    assert problem.rule == mine.tensorrt_llm.reason  # type: ignore[union-attr]


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Changes of the model config, the decoding config and the mapping.
    "pipeline_parallel_size": ({}, {}, {"pp_size": 2}),
    "context_parallel_size": ({}, {}, {"cp_size": 2}),
    "enable_attention_dp": ({}, {}, {"enable_attention_dp": True}),
    "lora_config": ({"lora_config": object()}, {}, {}),
    "sparse_attention_config": ({"sparse_attention_config": object()}, {}, {}),
    "kv_cache_compression_config": ({"kv_cache_compression_config": object()}, {}, {}),
    "attn_backend": ({"attn_backend": "FLASHINFER"}, {}, {}),
    "speculative_config.draft_len_schedule": ({}, {"draft_len_schedule": {4: 5}}, {}),
    "speculative_config.max_concurrency": ({}, {"max_concurrency": 4, "draft_len_schedule": {4: 5}}, {}),
    "speculative_config.acceptance_window": ({}, {"acceptance_window": 8}, {}),
    "speculative_config.acceptance_rate_window_size": ({}, {"acceptance_rate_window_size": 8}, {}),
    "speculative_config.sa_config": ({}, {"sa_config": object()}, {}),
    "speculative_config.eagle3_one_model": ({}, {"eagle3_one_model": False}, {}),
    "speculative_config.enable_penalty": ({}, {"enable_penalty": True}, {}),
}


@pytest.mark.parametrize("option", RUNS)
def test_a_run_is_refused_by_the_rules_for_files(option: str) -> None:
    model, spec, ranks = RUNS[option]
    (problem,) = found(model_config(**model), spec_config(**spec), mapping(**ranks))
    assert (problem.option, problem.rule) == (option, TREE_REFUSALS[option])


def test_static_trees_are_refused() -> None:
    (problem,) = found(spec=spec_config(eagle_choices=[[0]]))
    assert problem.option == "speculative_config.eagle_choices" and "static trees" in problem.rule


MTP: dict[str, Any] = {"decoding_type": "MTP", "speculative_model": None}
GLM = {"model_type": "glm4_moe", "num_nextn_predict_layers": 1}


@pytest.mark.parametrize("capability", [None, SM90, SM100])
@pytest.mark.parametrize("model", [GLM, GLM | {"model_type": "nemotron_h"}], ids=["glm", "nemotron"])
def test_a_tree_from_the_targets_mtp_layer_is_not_refused(capability: Any, model: dict[str, Any]) -> None:
    assert found(model_config(model), spec_config(**MTP), capability=capability) == []
    ranks = mapping(tp_size=2)
    assert found(model_config(model), spec_config(**MTP), ranks, capability=capability) == []


@pytest.mark.parametrize(
    ("model", "option", "says"),
    [
        (GLM | {"num_nextn_predict_layers": 0}, "speculative_config.decoding_type", "has no MTP layer"),
        (GLM | {"num_nextn_predict_layers": None}, "speculative_config.decoding_type", "counts none"),
        ({"model_type": "nemotron_h"}, "speculative_config.decoding_type", "has no MTP layer"),
        (GLM | {"num_nextn_predict_layers": 2}, "model: num_nextn_predict_layers", "must be 1"),
        (MLA | {"num_nextn_predict_layers": 1}, "speculative_config.decoding_type", "not of deepseek_v3"),
        (GLM | {"model_type": "qwen3"}, "speculative_config.decoding_type", "not of qwen3"),
    ],
)
def test_an_mtp_layer_that_no_tree_is_drafted_with_is_refused(
    model: dict[str, Any], option: str, says: str
) -> None:
    (problem,) = found(model_config(model), spec_config(**MTP))
    assert problem.option == option and says in problem.rule


def test_the_layer_of_an_mtp_tree_is_judged_as_the_targets(tmp_path: Path) -> None:
    """Its shape is the target's; of a head beside it nothing is read, as it is not used."""
    apart = Path(checkpoint(tmp_path / "layers"))
    (apart / "config.json").write_text(json.dumps(LLAMA | {"sliding_window": 64}), encoding="utf-8")
    (problem,) = found(model_config(GLM), spec_config(**MTP | {"speculative_model": str(apart)}))
    assert problem.option == "speculative_config.speculative_model" and "not with a head" in problem.rule
    many = GLM | {"num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 112}
    problems = found(model_config(many), spec_config(**MTP), capability=SM100)
    assert [problem.option for problem in problems] == ["verify attention backend", "lanes attention backend"]
    wrong = spec_config(**MTP, max_total_draft_tokens=300)
    problems = found(model_config({"model_type": "llama"}), wrong)
    assert {problem.option for problem in problems} == {
        "speculative_config.decoding_type",
        "speculative_config.max_total_draft_tokens",
    }


def test_a_rank_searches_the_targets_folder_for_its_mtp_layer(tmp_path: Path) -> None:
    target, layer = tiny_mtp_dir(tmp_path, "glm4_moe"), "model.layers.3"
    config = json.loads((target / "config.json").read_text(encoding="utf-8")) | {"head_dim": 128}
    spec = spec_config(**MTP)

    def of(path: object, **changes: object) -> list[Problem]:
        return found(model_config(config | changes, path=str(path)), spec)

    assert of(target) == []
    weights = load_file(target / "model.safetensors")
    weights[f"{layer}.eh_proj.weight"] = np.zeros((64, 64), np.float32)
    del weights[f"{layer}.mlp.experts.5.up_proj.weight"]
    save_file(weights, target / "model.safetensors")
    missing, wrong = of(target)
    assert missing.option == "model: MTP layer" and missing.rule.endswith(
        "lacks mlp.experts.5.up_proj.weight"
    )
    assert wrong.option == f"model: {layer}.eh_proj.weight" and "needs shape [64, 128]" in wrong.rule
    # Folders that it does not know.
    for path in ("", "owner/name", tmp_path / "nowhere", tmp_path):
        assert of(path) == []
    assert of(target, quantization_config={"quant_method": "modelopt"}) == []
    assert of(target, model_type="nemotron_h") == []


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"max_total_draft_tokens": 14}, "(S - 1) * K = 16 slots, which must be <= N"),
        ({"max_total_draft_tokens": 21}, "K * S"),
        ({"dynamic_tree_max_topK": 16, "max_draft_len": 4, "max_total_draft_tokens": 64}, "at most 64 nodes"),
        ({"dynamic_tree_max_topK": 20}, "1 <= dynamic_tree_max_topK <= 16"),
        ({"max_draft_len": 11, "max_total_draft_tokens": 44}, "1 <= max_draft_len <= 10"),
    ],
)
def test_sizes_that_no_tree_has_here_are_refused(fields: dict[str, Any], rule: str) -> None:
    problems = found(spec=spec_config(**fields))
    assert problems and any(rule in problem.rule for problem in problems)
    assert all(problem.option.startswith("speculative_config.") for problem in problems)


@pytest.mark.parametrize("algo", ["NVFP4", "INT8", SimpleNamespace(value="FP8_PER_TOKEN")])
def test_a_cache_in_another_dtype_is_refused(algo: Any) -> None:
    (problem,) = found(model_config(quant_config=SimpleNamespace(kv_cache_quant_algo=algo)))
    assert problem.option == "kv_cache_config.dtype" and "fp8 (E4M3, unscaled)" in problem.rule


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        (MLA, "speculative_model: kv_lora_rank"),
        ({"sliding_window": 64}, "speculative_model: sliding_window"),
    ],
)
def test_a_head_with_other_layers_is_refused(tmp_path: Path, changes: dict[str, Any], option: str) -> None:
    head = Path(checkpoint(tmp_path / "head"))
    assert found(spec=spec_config(speculative_model=head)) == []
    (head / "config.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    options = [problem.option for problem in found(spec=spec_config(speculative_model=str(head)))]
    assert option in options and options.count(option) == 1
    (line,) = (each.id for each in SCOPE if any(name == option for name in each.options))
    assert line in ("mla_draft", "sliding_lanes")


def checkpoint(path: Path, **scales: float) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    tensors = {f"layers.0.self_attn.{name}": np.array(value, np.float32) for name, value in scales.items()}
    save_file(tensors or {"x": np.zeros(1, np.float32)}, path / "model.safetensors")
    return str(path)


def test_scales_of_an_fp8_cache_are_refused_in_target_and_head(tmp_path: Path) -> None:
    target, head = checkpoint(tmp_path / "target", k_scale=0.5), checkpoint(tmp_path / "head", v_scale=2.0)
    spec = spec_config(speculative_model=Path(head))
    fp8 = SimpleNamespace(kv_cache_quant_algo="FP8")
    options = [problem.option for problem in found(model_config(path=target, quant_config=fp8), spec)]
    assert options == ["model: layers.0.self_attn.k_scale", "speculative_model: layers.0.self_attn.v_scale"]
    assert found(model_config(path=target), spec) == []


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_other_gpus_are_refused_for_target_and_head(tmp_path: Path, capability: tuple[int, int]) -> None:
    spec = spec_config(speculative_model=checkpoint(tmp_path / "head"))
    problems = found(spec=spec, capability=capability)
    assert [problem.option for problem in problems] == ["verify attention backend", "lanes attention backend"]
    assert f"{capability[0]}.{capability[1]}" in problems[0].rule


def test_heads_are_counted_by_rank(tmp_path: Path) -> None:
    spec = spec_config(speculative_model=checkpoint(tmp_path / "head"))
    many = model_config({"num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 112})
    problems = found(many, spec, capability=SM100)
    assert [problem.option for problem in problems] == ["verify attention backend"]
    assert "64 query heads a KV head: at most 32" in problems[0].rule and "head_dim 112" in problems[0].rule
    assert "a KV head" not in str(found(many, spec, mapping(tp_size=4), capability=SM100))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TLLM_TREE_VERIFY", "typical", "must be one of greedy, gumbel, rejection"),
        ("TLLM_FMHA_LIBS", "flashinfer_trtllm_gen,fallback", "names no trtllm_tree"),
    ],
)
def test_variables_of_the_process_are_checked(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    (problem,) = refusals(model_config(), spec_config(), mapping(), capability=SM90)
    assert problem.option == f"env_overrides.{name}" and says in problem.rule
    assert "contradicts" in str(found(spec=spec_config(use_rejection_sampling=True), verify="greedy"))


def manager(**fields: Any) -> Any:
    defaults: dict[str, Any] = {
        "tokens_per_block": 32,
        "max_beam_width": 1,
        "max_attention_window_vec": [2048],
        "max_seq_len": 2048,
        "kv_connector_manager": None,
    }
    return SimpleNamespace(**defaults | fields)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"tokens_per_block": 128}, "kv_cache_config.tokens_per_block"),
        ({"max_beam_width": 2}, "max_beam_width"),
        ({"max_attention_window_vec": [512, 2048]}, "kv_cache_config.max_attention_window"),
        ({"kv_connector_manager": object()}, "kv_connector_config"),
    ],
)
def test_what_the_kv_manager_shows_is_refused(fields: dict[str, Any], option: str) -> None:
    (problem,) = runtime_refusals(manager(**fields))
    assert problem.option == option and problem.rule and problem.remedy


def test_a_kv_manager_with_nothing_of_that_is_fine() -> None:
    # Layers that see everything, and layers of recurrent states.
    assert runtime_refusals(manager(max_attention_window_vec=[None, -1, 2048])) == []
    assert runtime_refusals(manager()) == [] and runtime_refusals(SimpleNamespace(tokens_per_block=16)) == []


def test_guided_decoding_is_refused_by_the_rule_for_files() -> None:
    assert guided_decoding_refusal().rule == TREE_REFUSALS["guided_decoding_backend"]


def test_many_blockers_come_in_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_TREE_VERIFY", "typical")
    model = model_config(
        MODELS["sliding_target"][0] | {"attn_logit_softcapping": 30.0},
        quant_config=SimpleNamespace(kv_cache_quant_algo="NVFP4"),
        lora_config=object(),
        attn_backend="VANILLA",
    )
    spec = spec_config(max_total_draft_tokens=300, sa_config=object(), draft_len_schedule={1: 5})
    ranks = mapping(pp_size=2, cp_size=2, enable_attention_dp=True)
    problems = refusals(model, spec, ranks, capability=SM90)
    options = [problem.option for problem in problems]
    assert len(set(zip(options, (problem.rule for problem in problems), strict=True))) == len(problems)
    assert set(options) == {
        "attn_backend",
        "context_parallel_size",
        "enable_attention_dp",
        "env_overrides.TLLM_TREE_VERIFY",
        "kv_cache_config.dtype",
        "lora_config",
        "model: attn_logit_softcapping",
        "model: sliding_window",
        "pipeline_parallel_size",
        "speculative_config.draft_len_schedule",
        "speculative_config.max_total_draft_tokens",
        "speculative_config.sa_config",
    }
    assert len(str(UnsupportedError(problems)).splitlines()) == len(problems)


def test_the_dtype_that_counts_is_the_one_the_target_computes_in(tmp_path: Path) -> None:
    """A checkpoint in float32 may be run in bfloat16."""
    spec = spec_config(speculative_model=checkpoint(tmp_path / "head"))
    fp8 = SimpleNamespace(kv_cache_quant_algo="FP8")
    half = model_config({"torch_dtype": "float32"}, quant_config=fp8, torch_dtype=torch.bfloat16)
    assert found(half, spec) == []
    full = model_config(quant_config=fp8, torch_dtype=torch.float32)
    assert "under float32" in str(found(full, spec)[0])
