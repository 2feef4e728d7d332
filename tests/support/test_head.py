"""`head_problems` names each thing that is wrong with a head, and names all of them together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import tiny_eagle3_dir, tiny_llama_dir
from trtllm_tree.errors import Problem
from trtllm_tree.support.head import aux_layer_ids, head_problems

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("models"))


@pytest.fixture
def head_dir(tmp_path: Path, target_dir: Path) -> Path:
    return tiny_eagle3_dir(tmp_path, target_dir)


def _parts(problems: list[Problem]) -> list[str]:
    return [problem.option.removeprefix("speculative_model: ") for problem in problems]


def _change_config(model_dir: Path, changes: dict[str, object]) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _change_weights(head_dir: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(head_dir / "model.safetensors")
    change(weights)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, head_dir / "model.safetensors")


def test_a_fitting_head_has_no_problems(tmp_path: Path, target_dir: Path, head_dir: Path) -> None:
    assert head_problems(head_dir, target_dir) == []
    whole = tiny_eagle3_dir(tmp_path, target_dir, name="whole", draft_vocab_size=300, own_embedding=True)
    assert head_problems(whole, target_dir) == []
    _change_weights(head_dir, lambda weights: weights.pop("t2d"))
    assert head_problems(head_dir, target_dir) == []
    # Written by a family of models that can slide, and does not here.
    _change_config(head_dir, {"sliding_window": 4096, "use_sliding_window": False, "layer_types": None})
    assert head_problems(head_dir, target_dir) == []


def test_a_multimodal_targets_text_config_is_read(tmp_path: Path, target_dir: Path, head_dir: Path) -> None:
    text = json.loads((target_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 999, "text_config": text}))
    assert head_problems(head_dir, tmp_path) == []


CONFIG_DAMAGES = [
    ({"hidden_size": 128}, "hidden_size"),
    ({"vocab_size": 320}, "vocab_size"),
    ({"hidden_size": None}, "hidden_size"),
    ({"vocab_size": -5}, "vocab_size"),
    ({"intermediate_size": "128"}, "intermediate_size"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 15}, "head_dim"),
    ({"draft_vocab_size": 301}, "draft_vocab_size"),
    ({"num_hidden_layers": 2}, "num_hidden_layers"),
    ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"norm_before_residual": True}, "norm_before_residual"),
    ({"norm_before_fc": True}, "norm_before_fc"),
    ({"sliding_window": 8}, "sliding_window"),
    ({"layer_types": ["sliding_attention"]}, "layer_types"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state"),
    ({IDS: [1, 2]}, IDS),
    ({IDS: [1, 2, "3"]}, IDS),
    ({IDS: [1, 2, 4]}, IDS),
    ({IDS: [-1, 2, 3]}, IDS),
    ({IDS: [2, 1, 3]}, IDS),
    ({IDS: None, "eagle_config": {IDS: [1, 2, 3]}}, IDS),
    ({IDS: None, "eagle_config": {IDS: [1, 2]}}, f"eagle_config.{IDS}"),
    ({"eagle_config": {IDS: [1, 2, 3]}}, IDS),
]


@pytest.mark.parametrize(("changes", "part"), CONFIG_DAMAGES)
def test_a_wrong_config_value_is_named(
    head_dir: Path, target_dir: Path, changes: dict[str, object], part: str
) -> None:
    _change_config(head_dir, changes)
    assert part in _parts(head_problems(head_dir, target_dir))


def test_four_target_layers_are_too_few_for_the_usual_three(head_dir: Path, target_dir: Path) -> None:
    _change_config(head_dir, {IDS: None})
    (problem,) = head_problems(head_dir, target_dir)
    assert problem.value == [2, 2, 1] and "4" in problem.rule


TENSORS = {
    "fc.weight": [64, 192],
    "midlayer.hidden_norm.weight": [64],
    "midlayer.input_layernorm.weight": [64],
    "midlayer.self_attn.q_proj.weight": [64, 128],
    "midlayer.self_attn.k_proj.weight": [32, 128],
    "midlayer.self_attn.v_proj.weight": [32, 128],
    "midlayer.self_attn.o_proj.weight": [64, 64],
    "midlayer.post_attention_layernorm.weight": [64],
    "midlayer.mlp.gate_proj.weight": [128, 64],
    "midlayer.mlp.up_proj.weight": [128, 64],
    "midlayer.mlp.down_proj.weight": [64, 128],
    "norm.weight": [64],
    "lm_head.weight": [96, 64],
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_tensor_is_named_with_the_shape_it_should_have(
    head_dir: Path, target_dir: Path, name: str
) -> None:
    _change_weights(head_dir, lambda weights: weights.pop(name))
    (problem,) = head_problems(head_dir, target_dir)
    assert _parts([problem]) == [name]
    assert "missing" in problem.rule and str(TENSORS[name]) in problem.rule


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    head_dir: Path, target_dir: Path, name: str
) -> None:
    _change_weights(head_dir, lambda weights: weights.update({name: weights[name][1:]}))
    (problem,) = head_problems(head_dir, target_dir)
    wanted = TENSORS[name]
    assert _parts([problem]) == [name]
    assert problem.value == [wanted[0] - 1, *wanted[1:]] and str(wanted) in problem.rule


def test_an_own_embedding_must_cover_the_targets_vocabulary(tmp_path: Path, target_dir: Path) -> None:
    head_dir = tiny_eagle3_dir(tmp_path, target_dir, own_embedding=True)
    _change_weights(head_dir, lambda weights: weights.update({"embed_tokens.weight": torch.zeros(299, 64)}))
    (problem,) = head_problems(head_dir, target_dir)
    assert _parts([problem]) == ["embed_tokens.weight"] and problem.value == [299, 64]


def test_a_tensor_that_would_be_ignored_is_named(head_dir: Path, target_dir: Path) -> None:
    _change_weights(head_dir, lambda weights: weights.update({"fc.bias": torch.zeros(64)}))
    assert _parts(head_problems(head_dir, target_dir)) == ["fc.bias"]


def _shift_out_of_range(weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"][95] = 300 - 95


def _repeat_a_target(weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"][1] = weights["d2t"][0] - 1


def _store_ids_instead_of_offsets(weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"] += torch.arange(96)


D2T_DAMAGES: list[tuple[Callable[[dict[str, torch.Tensor]], object], str, str]] = [
    (lambda weights: weights.pop("d2t"), "d2t", "missing"),
    (lambda weights: weights.update(d2t=weights["d2t"][:95]), "d2t", "[96]"),
    (lambda weights: weights.update(d2t=weights["d2t"].float()), "d2t", "integers"),
    (_shift_out_of_range, "d2t", "[0, 300)"),
    (_repeat_a_target, "d2t", "two draft ids"),
    (_store_ids_instead_of_offsets, "d2t", "offsets"),
    (lambda weights: weights.update(t2d=weights["t2d"][:299]), "t2d", "[300]"),
    (lambda weights: weights.update(t2d=weights["t2d"].int()), "t2d", "booleans"),
    (lambda weights: weights["t2d"].logical_not_(), "t2d", "exactly"),
]


@pytest.mark.parametrize(("damage", "part", "rule"), D2T_DAMAGES)
def test_a_wrong_draft_vocabulary_is_named(
    head_dir: Path,
    target_dir: Path,
    damage: Callable[[dict[str, torch.Tensor]], object],
    part: str,
    rule: str,
) -> None:
    _change_weights(head_dir, damage)
    problems = head_problems(head_dir, target_dir)
    assert any(part in _parts([problem]) and rule in problem.rule for problem in problems), problems


def test_several_damages_are_reported_together(head_dir: Path, target_dir: Path) -> None:
    _change_config(head_dir, {"vocab_size": 301, IDS: [0, 9, 10], "norm_before_residual": True})

    def damage(weights: dict[str, torch.Tensor]) -> None:
        del weights["norm.weight"]
        weights["fc.weight"] = weights["fc.weight"][:, :128]
        weights["d2t"][0] = -7

    _change_weights(head_dir, damage)
    problems = head_problems(head_dir, target_dir)
    assert sorted(_parts(problems)) == sorted(
        ["vocab_size", IDS, "norm_before_residual", "norm.weight", "fc.weight", "d2t"]
    )
    assert all(problem.remedy for problem in problems)


def test_missing_files_are_named(head_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    (missing,) = head_problems(tmp_path / "nowhere", target_dir)
    assert missing.option == "speculative_model" and "no such folder" in missing.rule
    (head_dir / "config.json").unlink()
    (head_dir / "model.safetensors").unlink()
    empty_target = tmp_path / "empty"
    empty_target.mkdir()
    problems = head_problems(head_dir, empty_target)
    assert [problem.option for problem in problems] == ["model", "speculative_model", "speculative_model"]
    assert "config.json" in problems[1].rule and "model.safetensors" in problems[2].rule


def test_a_pickled_head_is_refused_with_the_way_to_convert_it(head_dir: Path, target_dir: Path) -> None:
    (head_dir / "model.safetensors").rename(head_dir / "pytorch_model.bin")
    (problem,) = head_problems(head_dir, target_dir)
    assert "pytorch_model.bin" in problem.rule and "save_file" in problem.remedy


def test_unreadable_files_are_named(head_dir: Path, target_dir: Path) -> None:
    (head_dir / "config.json").write_text("{")
    (head_dir / "model.safetensors").write_bytes(b"not tensors")
    problems = head_problems(head_dir, target_dir)
    assert ["config.json" in str(p.value) for p in problems] == [True, False]
    assert ["model.safetensors" in str(p.value) for p in problems] == [False, True]


def test_a_target_that_is_no_language_model_is_named_and_the_head_still_checked(
    head_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    _change_weights(head_dir, lambda weights: weights.pop("fc.weight"))
    assert _parts(head_problems(head_dir, tmp_path)) == ["model", "fc.weight"]


def test_layer_ids_count_the_layers_that_are_entered() -> None:
    assert aux_layer_ids({IDS: [2, 15, 27], "eagle_config": {IDS: [1, 14, 26]}}, 30) == (2, 15, 27)
    assert aux_layer_ids({"eagle_config": {IDS: [1, 14, 26]}}, 30) == (2, 15, 27)
    assert aux_layer_ids({}, 32) == (2, 16, 29)


def test_the_check_runs_without_torch(head_dir: Path, target_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trtllm_tree.support.head import head_problems;"
        "print(head_problems(Path(sys.argv[1]), Path(sys.argv[2])), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(head_dir), str(target_dir)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[] False\n"
