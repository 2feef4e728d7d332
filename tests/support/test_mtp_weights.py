"""Whether a checkpoint holds the MTP layer that its config counts, by headers alone; what the embedded host says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.mtp_models import MTP_KINDS, NUM_LAYERS, drop_tensors, set_config, tiny_mtp_dir
from trtllm_tree import LLM, ConfigError, SpeculativeConfig
from trtllm_tree.errors import Problem
from trtllm_tree.support.model_facts import read_model_facts
from trtllm_tree.support.mtp_weights import mtp_weight_problems

LAYER = f"model.layers.{NUM_LAYERS}"


@pytest.fixture(params=MTP_KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_mtp_dir(tmp_path, request.param)


def problems_of(target_dir: Path) -> list[Problem]:
    facts = read_model_facts(target_dir)
    assert facts is not None
    return mtp_weight_problems(target_dir, facts)


def refused(target_dir: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> list[Problem]:
    """What the embedded host says, before the target is loaded."""
    monkeypatch.setattr("trtllm_tree.hosts.embedded.host.ModelRunner", None)
    config = SpeculativeConfig(decoding_type="MTP", tree_topk=2, num_steps=2)
    with pytest.raises(ConfigError) as caught:
        LLM(str(target_dir), speculative_config=config, device="cpu", **options)
    return list(caught.value.problems)


def test_a_complete_layer_is_found_in_one_file_and_in_shards(target: Path) -> None:
    assert problems_of(target) == []
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a": names[::2], "b": names[1::2]}
    for shard, mine in shards.items():
        save_file({name: weights[name] for name in mine}, target / f"{shard}.safetensors")
    index = {name: f"{shard}.safetensors" for shard, mine in shards.items() for name in mine}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert problems_of(target) == []
    config = SpeculativeConfig(decoding_type="MTP", tree_topk=2, num_steps=2)
    LLM(str(target), speculative_config=config, device="cpu", max_seq_len=64)


@pytest.mark.parametrize(
    "tensor",
    [
        "enorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "self_attn.o_proj.weight",
        "mlp.gate.weight",
    ],
)
def test_a_tensor_that_is_missing_is_named(target: Path, tensor: str) -> None:
    drop_tensors(target, f"{LAYER}.{tensor}")
    (problem,) = problems_of(target)
    assert problem.value == LAYER and problem.rule.endswith(f"the checkpoint lacks {tensor}")


def test_what_is_stored_of_the_targets_embedding_and_head_is_not_needed(target: Path) -> None:
    drop_tensors(target, f"{LAYER}.embed_tokens.weight", f"{LAYER}.shared_head.head.weight")
    assert problems_of(target) == []


def test_a_layer_that_is_not_there_at_all_is_one_problem(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(target / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if LAYER not in name}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    (problem,) = refused(target, monkeypatch)
    assert problem in problems_of(target)
    assert "enorm.weight, hnorm.weight, shared_head.norm.weight, eh_proj.weight and " in problem.rule
    assert "more" in problem.rule and "Eagle3" in problem.remedy


def test_a_wrong_shape_is_named(target: Path) -> None:
    weights = load_file(target / "model.safetensors")
    weights[f"{LAYER}.eh_proj.weight"] = weights[f"{LAYER}.eh_proj.weight"][:, :64].contiguous()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (problem,) = problems_of(target)
    assert (problem.option, problem.value) == (f"model: {LAYER}.eh_proj.weight", [64, 64])
    assert problem.rule == "its shape must be [64, 128]"


def test_a_target_without_experts_is_searched_for_the_rest(tmp_path: Path) -> None:
    """An MTP layer has experts even there, and they are not among the target's names."""
    target = tiny_mtp_dir(tmp_path, "deepseek_v3", first_k_dense_replace=NUM_LAYERS)
    assert problems_of(target) == []
    drop_tensors(target, f"{LAYER}.self_attn.kv_b_proj.weight")
    (problem,) = problems_of(target)
    assert "kv_b_proj" in problem.rule


def test_files_that_cannot_be_searched_are_said_to_be_so(target: Path) -> None:
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    (problem,) = problems_of(target)
    assert "cannot be searched for the MTP layer" in problem.rule
    path.unlink()
    (problem,) = problems_of(target)
    assert "has no safetensors" in problem.rule


def test_a_quantised_checkpoints_layer_is_refused(tmp_path: Path) -> None:
    target = tiny_mtp_dir(tmp_path, "glm4_moe")
    set_config(target, quantization_config={"quant_method": "compressed-tensors"})
    (problem,) = problems_of(target)
    assert (problem.option, problem.value) == ("model: quantization_config", "compressed-tensors")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_nextn_predict_layers": None}, [("speculative_config", "has no MTP layer")]),
        ({"num_nextn_predict_layers": 0}, [("speculative_config", "has no MTP layer")]),
        ({"num_nextn_predict_layers": 2}, [("model", "must be 1")]),
        ({"model_type": "qwen3_moe"}, [("speculative_config", "not of qwen3_moe")]),
    ],
)
def test_another_number_of_layers_and_another_model_are_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, object],
    expected: list[tuple[str, str]],
) -> None:
    target = tiny_mtp_dir(tmp_path, "glm4_moe")
    set_config(target, **config)
    problems = refused(target, monkeypatch)
    assert len(problems) == len(expected)
    for problem, (option, rule) in zip(problems, expected, strict=True):
        assert problem.option.startswith(option) and rule in problem.rule


def test_all_that_is_wrong_comes_in_one_report(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_config(target, num_nextn_predict_layers=2)
    drop_tensors(target, f"{LAYER}.hnorm.weight")
    problems = refused(target, monkeypatch, max_seq_len=9999)
    assert [problem.option for problem in problems] == [
        "max_seq_len",
        "model: num_nextn_predict_layers",
        "model: MTP layer",
    ]
