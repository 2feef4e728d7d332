"""Which checkpoints an unscaled FP8 cache would not honour, told by tensor and key before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trtllm_tree.errors import Problem
from trtllm_tree.support.kv_scales import kv_scale_problems

ATTENTION = "model.layers.0.self_attn"
STATIC_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def found(tmp_path: Path, **tensors: torch.Tensor) -> dict[str, Problem]:
    weights = {f"{ATTENTION}.k_proj.weight": torch.randn(4, 4)} | tensors
    save_file(weights, tmp_path / "model.safetensors")
    return by_option(tmp_path)


def by_option(model_dir: Path) -> dict[str, Problem]:
    problems = kv_scale_problems(model_dir)
    options = {problem.option: problem for problem in problems}
    assert len(options) == len(problems)
    return options


@pytest.mark.parametrize(
    "name",
    [
        "k_proj.k_scale",  # ModelOpt
        "v_proj.v_scale",
        "k_scale",  # compressed-tensors
        "attn.v_scale",
        "kv_scale",
        "k_proj.output_scale",
        "v_proj.output_scale",
        "kv_cache_scaling_factor",
    ],
)
def test_a_scale_other_than_1_is_refused_by_its_tensors_name(tmp_path: Path, name: str) -> None:
    tensor = f"{ATTENTION}.{name}"
    assert found(tmp_path, **{tensor: torch.tensor([1.0])}) == {}
    (problem,) = found(tmp_path, **{tensor: torch.tensor([0.25])}).values()
    assert problem.option == f"model: {tensor}" and problem.value == 0.25
    assert "a scale must be 1" in problem.rule and "kv_cache_dtype" in problem.remedy


@pytest.mark.parametrize(
    "name", ["k_proj.weight_scale", "k_proj.input_scale", "q_proj.output_scale", "q_scale"]
)
def test_scales_of_weights_activations_and_queries_are_none_of_the_caches(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, **{f"{ATTENTION}.{name}": torch.tensor(0.5)}) == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_scale_is_read_in_every_float_dtype_and_one_of_many_is_enough(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    per_head = torch.tensor([1.0, 0.75, 1.0, 1.0625], dtype=dtype)
    (problem,) = found(tmp_path, **{f"{ATTENTION}.k_scale": per_head}).values()
    assert problem.value == 0.75


@pytest.mark.parametrize("value", [torch.tensor([torch.nan]), torch.tensor([1], dtype=torch.int64)])
def test_a_scale_that_is_no_number_or_no_float_is_not_taken_for_1(
    tmp_path: Path, value: torch.Tensor
) -> None:
    assert list(found(tmp_path, **{f"{ATTENTION}.k_scale": value})) == [f"model: {ATTENTION}.k_scale"]


def test_every_shard_is_searched_and_every_scale_is_named(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.{side}_scale" for layer in (0, 1) for side in "kv"]
    for index, name in enumerate(names):
        save_file({name: torch.tensor(0.5 + index)}, tmp_path / f"model-{index + 1:05}-of-00004.safetensors")
    assert list(by_option(tmp_path)) == [
        f"model: {name}" for name in (names[0], names[1], names[2], names[3])
    ]


@pytest.mark.parametrize(
    ("section", "option"),
    [
        ({"kv_cache_quant_algo": "INT8"}, "quantization_config.kv_cache_quant_algo"),
        ({"kv_cache_quant_algo": "NVFP4"}, "quantization_config.kv_cache_quant_algo"),
        ({"kv_cache_scheme": STATIC_FP8 | {"type": "int"}}, "quantization_config.kv_cache_scheme"),
        ({"kv_cache_scheme": STATIC_FP8 | {"num_bits": 4}}, "quantization_config.kv_cache_scheme"),
        ({"kv_cache_scheme": STATIC_FP8 | {"dynamic": True}}, "quantization_config.kv_cache_scheme"),
        ({"kv_cache_scheme": "int8"}, "quantization_config.kv_cache_scheme"),
        ({"kv_cache_quant_algo": "FP8"}, None),
        ({"kv_cache_quant_algo": None, "kv_cache_scheme": None}, None),
        ({"kv_cache_scheme": STATIC_FP8, "quant_algo": "FP8"}, None),
    ],
)
def test_a_declared_cache_that_is_not_static_fp8_is_refused_by_its_key(
    tmp_path: Path, section: dict[str, object], option: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}), encoding="utf-8")
    assert list(by_option(tmp_path)) == ([] if option is None else [f"model: {option}"])


@pytest.mark.parametrize(
    ("algo", "refused"), [("FP8", False), (None, False), ("NVFP4", True), ("INT8", True)]
)
def test_modelopts_file_is_read(tmp_path: Path, algo: str | None, refused: bool) -> None:
    content = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": algo}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content), encoding="utf-8")
    options = ["model: hf_quant_config.json: quantization.kv_cache_quant_algo"]
    assert list(by_option(tmp_path)) == (options if refused else [])


def test_weights_that_cannot_be_searched_are_not_taken_for_unscaled(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (problem,) = kv_scale_problems(tmp_path, "speculative_model")
    assert problem.option == "speculative_model" and "a pickle cannot be searched" in problem.rule
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    (problem,) = kv_scale_problems(tmp_path)
    assert problem.value == str(tmp_path / "model.safetensors") and "its header is cut off" in problem.rule


def test_all_reasons_come_at_once(tmp_path: Path) -> None:
    section = {"kv_cache_quant_algo": "INT8", "kv_cache_scheme": STATIC_FP8 | {"dynamic": True}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}), encoding="utf-8")
    assert len(found(tmp_path, **{f"{ATTENTION}.{side}_scale": torch.tensor(2.0) for side in "kv"})) == 4
