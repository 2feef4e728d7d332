"""`trtllm-tree check` shows tree support (scope, both parts' backends, leaves), and blocks with all reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtllm_tree.cli.main import main
from trtllm_tree.demo import resolve_head
from trtllm_tree.support import gpus
from trtllm_tree.support.leaf_rules import LEAF_RULES
from trtllm_tree.support.scope import SCOPE

ROOT = Path(__file__).parents[2]
HEAD = str(resolve_head("demo"))
# Of the demo's target, which its head was trained for.
TARGET: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "vocab_size": 49152,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "torch_dtype": "bfloat16",
}
MLA = {"model_type": "deepseek_v3", "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "gpu_capabilities", lambda: None)


def model(tmp_path: Path, **changes: object) -> str:
    directory = tmp_path / "target"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TARGET | changes), encoding="utf-8")
    return str(directory)


def config(tmp_path: Path, *, topk: int | None = 4, **top: object) -> str:
    section: dict[str, Any] = {"decoding_type": "Eagle3", "speculative_model": HEAD, "max_draft_len": 5}
    if topk is not None:
        section |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": topk, "max_total_draft_tokens": 20}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"speculative_config": section, **top}), encoding="utf-8")
    return str(path)


def check_json(
    capsys: pytest.CaptureFixture[str], *argv: str, host: str = "embedded"
) -> tuple[int, dict[str, Any]]:
    code = main(["check", *argv, "--host", host, "--json"])
    return code, json.loads(capsys.readouterr().out)


def rows(report: dict[str, Any], verdict: str) -> list[str]:
    return [row["id"] for row in report["tree_support"]["scope"] if row["verdict"] == verdict]


def test_the_tables_show_every_line_both_parts_and_every_leaf(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    code = main(["check", config(tmp_path), "--model", model(tmp_path), "--host", "embedded"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    for line in SCOPE:
        assert f"│ {line.what} " in out
    for leaf in LEAF_RULES:
        assert f"│ {leaf} " in out
    for part in ("verify", "lanes"):
        (row,) = [line for line in out.splitlines() if f"{part} attention backend" in line]
        assert "supported" in row and "reference" in row
    (serves,) = [line for line in out.splitlines() if "serves on embedded" in line]
    assert [cell.strip() for cell in serves.split("│")[2:6]] == ["reference", "triton", "triton", "triton"]


def test_json_says_the_same_as_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = check_json(capsys, config(tmp_path), "--model", model(tmp_path))
    tree = report["tree_support"]
    assert code == 0 and report["ok"] and tree["host"] == "embedded"
    assert [row["id"] for row in tree["scope"]] == [line.id for line in SCOPE]
    assert rows(report, "blocked") == []
    assert [(row["part"], row["backend"], row["verdict"]) for row in tree["backends"]] == [
        ("verify", "reference", "supported"),
        ("lanes", "reference", "supported"),
    ]
    assert tree["leaves"]["triton"]["sm90"] == [] and tree["leaves"]["trtllm_gen"]["sm90"]
    assert tree["models"]["target"]["head_dim"] == 64 and tree["models"]["draft"]["num_kv_heads"] == 3


def test_a_chain_has_no_tree_support_to_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = check_json(capsys, config(tmp_path, topk=None), "--model", model(tmp_path))
    assert code == 0 and report["tree_support"] is None


def test_the_gpu_that_is_seen_decides_which_leaf_serves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, directory = config(tmp_path), model(tmp_path)
    for capability, host, leaf in (
        ((9, 0), "embedded", "triton"),
        ((7, 5), "embedded", "reference"),
        ((9, 0), "tensorrt_llm", "triton"),
        ((10, 0), "tensorrt_llm", "trtllm_gen"),
    ):
        monkeypatch.setattr(gpus, "gpu_capabilities", lambda found=capability: [found])
        code, report = check_json(capsys, path, "--model", directory, host=host)
        backends = report["tree_support"]["backends"]
        assert code == 0 and {row["backend"] for row in backends} == {leaf}


def test_no_leaf_for_this_gpu_blocks_both_parts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "gpu_capabilities", lambda: [(7, 5)])
    code, report = check_json(capsys, config(tmp_path), "--model", model(tmp_path), host="tensorrt_llm")
    assert code == 1
    options = [problem["option"] for problem in report["problems"]]
    assert options == ["verify attention backend", "lanes attention backend"]
    assert {row["verdict"] for row in report["tree_support"]["backends"]} == {"blocked"}


def test_what_is_not_known_is_said_to_be_unknown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = check_json(capsys, config(tmp_path), "--model", model(tmp_path), host="tensorrt_llm")
    assert code == 0
    assert [row["verdict"] for row in report["tree_support"]["backends"]] == ["unknown", "unknown"]
    assert "no GPU" in report["tree_support"]["backends"][0]["reason"]
    code, report = check_json(capsys, config(tmp_path))
    assert code == 0 and "the model" in report["tree_support"]["backends"][0]["reason"]
    assert report["tree_support"]["leaves"] == {}


def test_an_mla_target_and_a_grouped_head_have_leaves_of_their_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "gpu_capabilities", lambda: [(9, 0)])
    code, report = check_json(capsys, config(tmp_path), "--model", model(tmp_path, **MLA))
    tree = report["tree_support"]
    assert code == 0
    assert [row["backend"] for row in tree["backends"]] == ["triton", "triton"]
    assert tree["models"]["target"]["value_dim"] == 512
    assert tree["leaves"]["trtllm_gen_mla"]["sm100"] == [] and tree["leaves"]["flashinfer_fa2"]["sm90"]

    (tmp_path / "wide").mkdir()
    wide = model(tmp_path / "wide", **MLA | {"kv_lora_rank": 1024})
    code, report = check_json(capsys, config(tmp_path), "--model", wide)
    assert [row["backend"] for row in report["tree_support"]["backends"]] == ["reference", "triton"]


@pytest.mark.parametrize(
    ("changes", "host", "line", "option"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "embedded", "recurrent", "layer_types"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "tensorrt_llm", "recurrent", "layer_types"),
        ({"sliding_window": 64}, "tensorrt_llm", "sliding_target", "sliding_window"),
        ({"model_type": "gpt_oss"}, "tensorrt_llm", "sinks", "model_type"),
        ({"attn_logit_softcapping": 50.0}, "embedded", "softcap", "attn_logit_softcapping"),
        ({"engram_layer_ids": [2]}, "embedded", "token_history", "engram_layer_ids"),
        (
            MLA | {"quantization_config": {"quant_method": "fp8"}},
            "embedded",
            "mla_quantised",
            "quantization_config",
        ),
    ],
)
def test_a_model_that_the_host_refuses_blocks_by_name(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    changes: dict[str, Any],
    host: str,
    line: str,
    option: str,
) -> None:
    code, report = check_json(capsys, config(tmp_path), "--model", model(tmp_path, **changes), host=host)
    (problem,) = report["problems"]
    assert code == 1 and problem["option"] == f"model: {option}"
    assert rows(report, "blocked") == [line]


def test_sliding_windows_and_sinks_run_on_the_embedded_host(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changes = {"model_type": "gpt_oss", "sliding_window": 64}
    code, report = check_json(capsys, config(tmp_path), "--model", model(tmp_path, **changes))
    assert code == 0 and set(report["tree_support"]["serving"].values()) == {"reference"}


def test_five_blockers_of_five_places_come_in_one_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "gpu_capabilities", lambda: [(7, 5)])
    # An option, a cache dtype, a model's layers, a head for another width, and backends of both parts.
    path = config(tmp_path, enable_lora=True, kv_cache_config={"dtype": "nvfp4"})
    directory = model(tmp_path, layer_types=["linear_attention"], hidden_size=2048, head_dim=64)
    code = main(["check", path, "--model", directory, "--host", "tensorrt_llm"])
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert code == 1 and "problems" in out
    for words in (
        "enable_lora",
        "kv_cache_config.dtype",
        "model: layer_types",
        "2048",
        "verify attention",
        "lanes ",
    ):
        assert any(words in line for line in lines), words
    report = check_json(capsys, path, "--model", directory, host="tensorrt_llm")[1]
    assert len(report["problems"]) == len(lines)
    assert rows(report, "blocked") == ["eagle3", "gqa", "kv_other_dtypes", "recurrent", "lora"]


def test_a_head_whose_layer_slides_blocks_the_line_of_its_lanes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").symlink_to(Path(HEAD) / "model.safetensors")
    settings = json.loads((Path(HEAD) / "config.json").read_text()) | {"sliding_window": 64}
    (head / "config.json").write_text(json.dumps(settings))
    argv = (config(tmp_path), "--model", model(tmp_path), "--speculative-model", str(head))
    code, report = check_json(capsys, *argv)
    assert code == 1 and rows(report, "blocked") == ["eagle3", "sliding_lanes"]


def test_scales_of_a_checkpoint_block_an_fp8_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = model(
        tmp_path, quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}
    )
    path = config(tmp_path, kv_cache_config={"dtype": "fp8"})
    code, report = check_json(capsys, path, "--model", directory)
    assert code == 1 and rows(report, "blocked") == ["kv_fp8"]


def test_a_table_of_a_model_is_made_without_torch(tmp_path: Path) -> None:
    code = f"""
import runpy, sys
sys.argv = ['trtllm-tree', 'check', {config(tmp_path)!r}, '--model', {model(tmp_path)!r}, '--host', 'embedded']
try:
    runpy.run_module("trtllm_tree", run_name="__main__")
except SystemExit as leave:
    assert leave.code == 0
print(sorted({{"torch", "triton", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Leaves for the target" in done.stdout and done.stdout.splitlines()[-1] == "[]"
