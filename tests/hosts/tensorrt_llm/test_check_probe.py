"""`trtllm-tree check --host tensorrt_llm` shows what the installed one offers, and blocks on what it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.doubles.tensorrt_llm import double_entries
from tests.hosts.tensorrt_llm.conftest import Install
from trtllm_tree.cli.main import main
from trtllm_tree.demo import resolve_head
from trtllm_tree.hosts.tensorrt_llm import probe as probing
from trtllm_tree.hosts.tensorrt_llm.probe import NOT_INSTALLED
from trtllm_tree.hosts.tensorrt_llm.symbols import FEATURES
from trtllm_tree.support import gpus


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "gpu_capabilities", lambda: None)
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write(tmp_path, use_dynamic_tree=True, dynamic_tree_max_topK=4, max_total_draft_tokens=20)


def write(folder: Path, **keys: object) -> str:
    section = {"decoding_type": "Eagle3", "speculative_model": str(resolve_head("demo")), "max_draft_len": 5}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"speculative_config": section | keys}), encoding="utf-8")
    return str(path)


def check(capsys: pytest.CaptureFixture[str], path: str, *options: str) -> tuple[int, str, list[str]]:
    code = main(["check", path, "--host", "tensorrt_llm", *options])
    out, err = capsys.readouterr()
    return code, out, [line for line in err.splitlines() if not line.startswith("[TensorRT-LLM]")]


def check_json(capsys: pytest.CaptureFixture[str], path: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = check(capsys, path, "--json")
    return code, json.loads(out)


@pytest.mark.parametrize("layout", ["new", "old"])
def test_the_table_has_a_row_for_each_feature(
    capsys: pytest.CaptureFixture[str], install_double: Install, config: str, layout: str
) -> None:
    install_double(double_entries(layout), layout)
    code, out, err = check(capsys, config)
    assert (code, err) == (0, [])
    for feature in FEATURES:
        (row,) = [line for line in out.splitlines() if f"│ {feature.id}: " in line]
        assert "│ available │ -" in row
    assert f"TensorRT-LLM {'1.4.0rc1' if layout == 'new' else '1.3'}:" in out and "0 do not" in out


def test_json_is_not_spoilt_by_the_greeting_and_says_the_same(
    capsys: pytest.CaptureFixture[str], install_double: Install, config: str
) -> None:
    install_double(double_entries("new"), "new")
    code, report = check_json(capsys, config)
    found = report["tensorrt_llm"]
    assert code == 0 and found["installed"] and found["version"] == "1.4.0rc1" and found["mismatches"] == []
    assert [feature["id"] for feature in found["features"]] == [feature.id for feature in FEATURES]
    assert {feature["verdict"] for feature in found["features"]} == {"available"}
    path = "tensorrt_llm._torch.attention.backends.fmha.registry.FMHA_LIBS"
    assert found["symbols"]["fmha.FMHA_LIBS"] == path


def test_a_tree_is_blocked_by_all_that_its_installation_lacks_and_a_chain_is_not(
    capsys: pytest.CaptureFixture[str], install_double: Install, config: str, tmp_path: Path
) -> None:
    install_double(double_entries("1.2.1"), "1.2.1")
    code, report = check_json(capsys, config)
    found = report["tensorrt_llm"]
    verdicts = {feature["id"]: feature["verdict"] for feature in found["features"]}
    assert code == 1 and not report["ok"]
    assert {verdicts[name] for name in ("chain", "llm_api", "serve", "drafter")} == {"available"}
    assert {verdicts[name] for name in ("trees", "slots", "fmha", "mtp")} == {"missing"}
    options = [problem["option"] for problem in report["problems"]]
    # MTP's worker is another feature's business.
    others = [one["path"] for one in found["mismatches"] if one["path"] not in options]
    assert set(options) < {one["path"] for one in found["mismatches"]}
    assert "tensorrt_llm._torch.speculative.mtp_dynamic_tree" in others
    code, out, err = check(capsys, config)
    assert code == 1 and len(err) == len(options) and all("'1.2.1'" in line for line in err)
    (row,) = [line for line in out.splitlines() if "│ chain: " in line]
    assert "│ available │ -" in row
    (row,) = [line for line in out.splitlines() if "│ model:LlamaForCausalLM: " in line]
    assert "│ missing   │ feature trees " in row

    code, report = check_json(capsys, write(tmp_path))
    assert code == 0 and report["ok"] and report["tensorrt_llm"]["version"] == "1.2.1"


def test_without_tensorrt_llm_one_line_says_so_and_nothing_is_wrong(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing.importlib.util, "find_spec", lambda name: None)
    code, out, err = check(capsys, config)
    assert (code, err) == (0, [])
    assert [line for line in out.splitlines() if "not installed" in line] == [f"{NOT_INSTALLED}."]
    code, report = check_json(capsys, config)
    assert code == 0 and report["tensorrt_llm"] == {
        "installed": False,
        "version": None,
        "features": [],
        "symbols": {},
        "mismatches": [],
    }


def test_the_embedded_host_is_not_told_about_tensorrt_llm(
    capsys: pytest.CaptureFixture[str], install_double: Install, config: str
) -> None:
    install_double(double_entries("1.2.1"), "1.2.1")
    assert main(["check", config, "--host", "embedded", "--json"]) == 0
    assert "tensorrt_llm" not in json.loads(capsys.readouterr().out)
