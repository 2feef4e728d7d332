"""Whether a checkpoint holds the MTP layer that its config counts, by headers alone; what the embedded host says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.mtp_models import MTP_KINDS, NUM_LAYERS, drop_tensors, set_config, tiny_mtp_dir
from trtllm_tree import LLM, ConfigError, SpeculativeConfig
from trtllm_tree.config.host_rules import Host
from trtllm_tree.errors import Problem
from trtllm_tree.support.model_facts import read_model_facts
from trtllm_tree.support.mtp_weights import mtp_weight_problems

INDEX = "model.safetensors.index.json"
LAYER = f"model.layers.{NUM_LAYERS}"


@pytest.fixture(params=MTP_KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_mtp_dir(tmp_path, request.param)


def problems_of(target_dir: Path, host: Host = "embedded") -> list[Problem]:
    facts = read_model_facts(target_dir)
    assert facts is not None
    return mtp_weight_problems(target_dir, facts, host)


def split(target_dir: Path, parts: dict[str, list[str]], index: dict[str, str] | None = None) -> None:
    """Write the weights to files of these names of tensors; with the index, or that of all of them."""
    weights = load_file(target_dir / "model.safetensors")
    (target_dir / "model.safetensors").unlink()
    for file, names in parts.items():
        save_file({name: weights[name] for name in names}, target_dir / file, metadata={"format": "pt"})
    weight_map = index or {name: file for file, names in parts.items() for name in names}
    (target_dir / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def by_layer(target_dir: Path) -> tuple[list[str], list[str]]:
    """Names of the target's tensors, and of the MTP layer's."""
    names = sorted(load_file(target_dir / "model.safetensors"))
    return [n for n in names if LAYER not in n], [n for n in names if LAYER in n]


def refused(target_dir: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> list[Problem]:
    """What the embedded host says, before the target is loaded."""
    monkeypatch.setattr("trtllm_tree.hosts.embedded.host.ModelRunner", None)
    config = SpeculativeConfig(decoding_type="MTP", tree_topk=2, num_steps=2)
    with pytest.raises(ConfigError) as caught:
        LLM(str(target_dir), speculative_config=config, device="cpu", **options)
    return list(caught.value.problems)


def test_a_complete_layer_is_found_in_one_file_and_in_shards(target: Path) -> None:
    assert problems_of(target) == []
    names = sorted(load_file(target / "model.safetensors"))
    split(target, {"a.safetensors": names[::2], "b.safetensors": names[1::2]})
    assert problems_of(target) == []
    config = SpeculativeConfig(decoding_type="MTP", tree_topk=2, num_steps=2)
    LLM(str(target), speculative_config=config, device="cpu", max_seq_len=64)


@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("file beside model.safetensors", "which transformers does not read beside model.safetensors"),
        ("file outside the index", f"which {INDEX} does not list"),
        ("tensor outside the index", f"where {INDEX} does not list them"),
    ],
)
def test_a_layer_in_a_file_that_is_not_read_is_refused_by_that_file(
    target: Path, monkeypatch: pytest.MonkeyPatch, case: str, place: str
) -> None:
    mine, layers = by_layer(target)
    file = "all.safetensors" if case.startswith("tensor") else "mtp.safetensors"
    if case.startswith("tensor"):
        split(target, {file: mine + layers}, dict.fromkeys(mine, file))
    else:
        split(target, {"a.safetensors": mine, file: layers}, dict.fromkeys(mine, "a.safetensors"))
    if case.endswith("model.safetensors"):
        # Which goes before an index.
        (target / "a.safetensors").rename(target / "model.safetensors")
    (problem,) = refused(target, monkeypatch)
    assert problem in problems_of(target)
    assert (problem.option, problem.value) == ("model: MTP layer", LAYER)
    assert "shared_head.norm.weight, eh_proj.weight and " in problem.rule
    assert f"lie in {file}, {place}" in problem.rule and INDEX in problem.remedy


def test_tensors_that_are_nowhere_and_tensors_that_are_not_read_are_told_apart(target: Path) -> None:
    mine, layers = by_layer(target)
    kept = [name for name in layers if not name.endswith(("enorm.weight", "hnorm.weight"))]
    other = [f"{LAYER}.hnorm.weight"]
    index = dict.fromkeys(mine + kept, "a.safetensors")
    split(target, {"a.safetensors": mine + kept, "b.safetensors": other}, index)
    (target / "c.safetensors").write_bytes(b"broken, and nobody reads it")
    absent, unread = problems_of(target)
    assert absent.rule.endswith("the checkpoint lacks enorm.weight")
    assert "'s hnorm.weight lie in b.safetensors, which" in unread.rule
    # It reads every file.
    (target / "c.safetensors").unlink()
    if (json.loads((target / "config.json").read_text()))["model_type"] == "glm4_moe":
        assert problems_of(target, "tensorrt_llm") == [absent]


@pytest.mark.parametrize("host", ["embedded", "tensorrt_llm"])
def test_a_listed_file_that_is_missing_is_named_and_not_what_was_in_it(tmp_path: Path, host: Host) -> None:
    target = tiny_mtp_dir(tmp_path, "glm4_moe")
    mine, layers = by_layer(target)
    split(target, {"a.safetensors": mine, "b.safetensors": layers})
    assert problems_of(target, host) == []
    (target / "b.safetensors").unlink()
    (problem,) = problems_of(target, host)
    assert (problem.option, problem.value) == ("model", str(target))
    assert problem.rule == f"lacks b.safetensors, which {INDEX} lists"


def test_an_index_without_a_list_is_said_to_be_so(target: Path) -> None:
    mine, layers = by_layer(target)
    split(target, {"a.safetensors": mine + layers})
    (target / INDEX).write_text("[]")
    (problem,) = problems_of(target)
    assert "cannot be searched for the MTP layer" in problem.rule and "no weight_map" in problem.rule


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
    assert problem.rule == "the MTP layer needs shape [64, 128] here"


@pytest.mark.parametrize("kind", MTP_KINDS)
@pytest.mark.parametrize(
    "tensor",
    ["self_attn.o_proj.weight"]
    + [f"mlp.{name}" for name in ("gate.weight", "gate.e_score_correction_bias", "experts.7.up_proj.weight")]
    + ["mlp.shared_experts.down_proj.weight"],
)
def test_a_dense_targets_layer_has_the_experts_that_config_json_tells_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tensor: str
) -> None:
    """They are not among the target's names."""
    target = tiny_mtp_dir(tmp_path, kind, first_k_dense_replace=NUM_LAYERS)
    assert problems_of(target) == []
    weights = load_file(target / "model.safetensors")
    name = f"{LAYER}.{tensor}"
    size = list(weights[name].shape)
    weights[name] = weights[name][:1].clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (problem,) = refused(target, monkeypatch)
    assert (problem.option, problem.value) == (f"model: {name}", [1, *size[1:]])
    assert problem.rule == f"the MTP layer needs shape {size} here"
    drop_tensors(target, name)
    (problem,) = refused(target, monkeypatch)
    assert problem.rule.endswith(f"the checkpoint lacks {tensor}")


def test_experts_that_config_json_does_not_count_are_left_to_the_load(tmp_path: Path) -> None:
    target = tiny_mtp_dir(tmp_path, "glm4_moe", first_k_dense_replace=NUM_LAYERS)
    drop_tensors(target, f"{LAYER}.mlp.gate.weight", f"{LAYER}.hnorm.weight")
    set_config(target, n_routed_experts=None)
    (problem,) = problems_of(target)
    assert problem.rule.endswith("the checkpoint lacks hnorm.weight")


def test_tensorrt_llm_reads_every_file_but_a_consolidated_one(tmp_path: Path) -> None:
    target = tiny_mtp_dir(tmp_path, "glm4_moe")
    mine, layers = by_layer(target)
    split(target, {"a.safetensors": mine, "mtp.safetensors": layers}, dict.fromkeys(mine, "a.safetensors"))
    assert problems_of(target, "tensorrt_llm") == []
    (target / "mtp.safetensors").rename(target / "consolidated.safetensors")
    (problem,) = problems_of(target, "tensorrt_llm")
    assert problem.option == "model: MTP layer" and "the checkpoint lacks enorm.weight" in problem.rule
    for path in target.glob("*.safetensors"):
        path.unlink()
    assert problems_of(target, "tensorrt_llm") == []


@pytest.mark.parametrize("declared", ["config.json", "hf_quant_config.json"])
def test_of_a_quantised_layer_tensorrt_llm_needs_what_joins_and_norms(tmp_path: Path, declared: str) -> None:
    target = tiny_mtp_dir(tmp_path, "glm4_moe")
    weights = load_file(target / "model.safetensors")
    # As packed weights are: other shapes, other names, scales beside them in some layers only.
    packed = f"{LAYER}.eh_proj.weight"
    weights[f"{packed}_packed"] = weights.pop(packed)[:, :8].contiguous()
    query = f"{LAYER}.self_attn.q_proj.weight"
    weights[query] = weights[query][:, :8].contiguous()
    weights[f"{LAYER[:-1]}{NUM_LAYERS - 1}.self_attn.q_proj.weight_scale"] = torch.ones(1)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    assert len(problems_of(target, "tensorrt_llm")) > 1
    if declared == "config.json":
        set_config(target, quantization_config={"quant_method": "compressed-tensors"})
    else:
        (target / declared).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert problems_of(target, "tensorrt_llm") == []
    drop_tensors(target, f"{packed}_packed", f"{LAYER}.shared_head.norm.weight")
    (problem,) = problems_of(target, "tensorrt_llm")
    assert problem.rule.endswith("the checkpoint lacks shared_head.norm.weight, eh_proj.weight")


@pytest.mark.parametrize("kind", ["deepseek_v3", "nemotron_h"])
def test_tensorrt_llms_other_layouts_are_not_searched(tmp_path: Path, kind: str) -> None:
    target = tiny_mtp_dir(tmp_path, "glm4_moe")
    drop_tensors(target, f"{LAYER}.hnorm.weight")
    assert len(problems_of(target, "tensorrt_llm")) == 1
    set_config(target, model_type=kind)
    assert problems_of(target, "tensorrt_llm") == []


def test_files_that_cannot_be_searched_are_said_to_be_so(target: Path) -> None:
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    (problem,) = problems_of(target)
    assert "cannot be searched for the MTP layer" in problem.rule
    path.unlink()
    (problem,) = problems_of(target)
    assert "has no safetensors" in problem.rule


def test_a_config_that_does_not_say_where_the_layer_is_is_no_causal_models(target: Path) -> None:
    set_config(target, num_hidden_layers=None)
    (problem,) = problems_of(target)
    assert problem.rule == "config.json needs hidden_size and num_hidden_layers"


def test_a_quantised_checkpoints_layer_is_refused(tmp_path: Path) -> None:
    target = tiny_mtp_dir(tmp_path, "glm4_moe")
    set_config(target, quantization_config={"quant_method": "compressed-tensors"})
    (problem,) = problems_of(target)
    assert (problem.option, problem.value) == ("model: quantization_config", "compressed-tensors")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_nextn_predict_layers": 0}, [("speculative_config", "counts none (num_nextn_predict_layers)")]),
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


def test_a_count_that_is_null_is_none_and_one_that_is_not_written_is_transformers(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_config(target, num_nextn_predict_layers=None)
    assert problems_of(target) == []
    drop_tensors(target, f"{LAYER}.hnorm.weight")
    (problem,) = refused(target, monkeypatch)
    assert problem.option == "model: MTP layer" and problem.rule.endswith("lacks hnorm.weight")
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": None}))
    (problem,) = refused(target, monkeypatch)
    assert "config.json counts none (num_nextn_predict_layers)" in problem.rule
    assert problem.remedy.startswith("Set num_nextn_predict_layers to 1")


def test_all_that_is_wrong_comes_in_one_report(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_config(target, num_nextn_predict_layers=2)
    drop_tensors(target, f"{LAYER}.hnorm.weight")
    problems = refused(target, monkeypatch, max_seq_len=9999)
    assert [problem.option for problem in problems] == [
        "max_seq_len",
        "model: num_nextn_predict_layers",
        "model: MTP layer",
    ]
