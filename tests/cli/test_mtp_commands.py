"""The commands with configs/tree_mtp.yaml: a drafter that the target brings, and no head to name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.mtp_models import MTP_KINDS, set_config, tiny_mtp_dir
from trtllm_tree.cli.main import main
from trtllm_tree.config.host_rules import TREE_ENVIRONMENT, VERIFY_VARIABLE

CONFIG = str(Path(__file__).parents[2] / "configs/tree_mtp.yaml")
PROMPT = ["--prompt", "tell me", "--raw", "--max-tokens", "24"]


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A target whose MTP layer is often right. The file's variables are set in this process, for a test's time."""
    for name in (*TREE_ENVIRONMENT, VERIFY_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return str(tiny_mtp_dir(tmp_path, getattr(request, "param", "glm4_moe"), agrees=True))


def _last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("model", MTP_KINDS, indirect=True)
def test_compare_finds_plain_chain_and_tree_alike_and_drafts_accepted(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--config", CONFIG, "--model", model, *PROMPT, "--compare", "--json"]) == 0
    report = _last_json(capsys)
    assert report["identical"] is True
    forwards = {name: report[name]["target_forwards"] for name in ("plain", "chain", "tree")}
    assert forwards["plain"] > forwards["chain"] and forwards["plain"] > forwards["tree"]


def test_one_run_prints_what_the_tree_gave(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--config", CONFIG, "--model", model, *PROMPT, "--json"]) == 0
    report = _last_json(capsys)
    assert report["tokens_per_forward"] > 1


def test_trace_draws_its_trees(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["trace", "--html", str(page), "--config", CONFIG, "--model", model, *PROMPT]) == 0
    text = page.read_text(encoding="utf-8")
    assert "Draft trees of" in text and "tokens per target forward" in text
    assert "rounds" in capsys.readouterr().out


@pytest.mark.parametrize("model", MTP_KINDS, indirect=True)
def test_check_plans_the_lanes_over_the_targets_own_cache(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    code = main(["check", CONFIG, "--model", model, "--host", "embedded", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["problems"]) == (0, [])
    assert report["resolved"]["decoding_type"] == "MTP" and report["resolved"]["speculative_model"] is None
    lines = {line["id"]: line["verdict"] for line in report["tree_support"]["scope"]}
    assert lines["mtp"] == lines["mla_draft"] == "supported" and lines["multi_depth_mtp"] == "refused"
    tree = report["tree_support"]
    assert [(row["part"], row["verdict"]) for row in tree["backends"]] == [
        ("verify", "supported"),
        ("lanes", "supported"),
    ]
    assert tree["models"]["draft"] == tree["models"]["target"]


@pytest.mark.parametrize("host", ["embedded", "tensorrt_llm"])
def test_check_blocks_the_line_of_mtp_by_weights_that_are_missing_or_misshapen(
    model: str, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    path = Path(model) / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.3.hnorm.weight"]
    weights["model.layers.3.eh_proj.weight"] = weights["model.layers.3.eh_proj.weight"][:1].clone()
    save_file(weights, path, metadata={"format": "pt"})
    report = _checked(model, capsys, host)
    options = [problem["option"] for problem in report["problems"]]
    assert options == ["model: MTP layer", "model: model.layers.3.eh_proj.weight"]
    assert _blocked(report) == ["mtp"]
    chain = {"model": model, "speculative_config": {"decoding_type": "MTP", "max_draft_len": 3}}
    config = Path(model) / "chain.yaml"
    config.write_text(json.dumps(chain), encoding="utf-8")
    # TensorRT-LLM's own.
    assert main(["check", str(config), "--host", host, "--json"]) == (1 if host == "embedded" else 0)


def test_check_blocks_the_line_of_mtp_by_quantised_weights_on_the_embedded_host_alone(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    set_config(Path(model), quantization_config={"quant_method": "fp8"})
    report = _checked(model, capsys, "embedded")
    assert [problem["option"] for problem in report["problems"]] == ["model: quantization_config"]
    assert _blocked(report) == ["mtp"]
    assert _checked(model, capsys, "tensorrt_llm")["problems"] == []


def _checked(model: str, capsys: pytest.CaptureFixture[str], host: str) -> dict[str, Any]:
    capsys.readouterr()
    main(["check", CONFIG, "--model", model, "--host", host, "--json"])
    return json.loads(capsys.readouterr().out)


def _blocked(report: dict[str, Any]) -> list[str]:
    return [line["id"] for line in report["tree_support"]["scope"] if line["verdict"] == "blocked"]


def test_check_without_a_model_asks_for_the_models_config_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", CONFIG, "--host", "embedded", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tree_support"]["backends"]
    assert {row["reason"] for row in rows} == {"needs a config.json of the model that says its heads"}


def test_acceptance_measures_chain_and_tree(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, prompts = tmp_path / "run.yaml", tmp_path / "three.jsonl"
    config.write_text(f"model: {model}\n{Path(CONFIG).read_text(encoding='utf-8')}", encoding="utf-8")
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("a", "bc", "def")))
    argv = ["bench", "acceptance", "--config", str(config), "--max-tokens", "24", "--json", str(prompts)]
    assert main(argv) == 0
    rows: Any = _last_json(capsys)
    assert [(row["mode"], row["num_prompts"]) for row in rows] == [("chain", 3), ("tree", 3)]
    assert all(row["tokens_per_forward"] > 1 for row in rows)
