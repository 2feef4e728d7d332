"""Tree options and every refusal, as a user meets them: `trtllm-tree check`, its output and its exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.mtp_models import drop_tensors, set_config, tiny_mtp_dir
from trtllm_tree import __version__
from trtllm_tree.cli.main import main
from trtllm_tree.demo import resolve_head

ROOT = Path(__file__).parents[2]
DEMO, TREE_EAGLE = str(ROOT / "configs/demo.yaml"), str(ROOT / "configs/tree_eagle.yaml")
# Of the demo's target, which its head was trained for.
TARGET_CONFIG = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}


def check(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, list[str]]:
    code = main(["check", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def check_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code, out, err = check(capsys, *argv, "--json")
    assert err == []
    return code, json.loads(out)


@pytest.fixture
def target(tmp_path: Path) -> str:
    directory = tmp_path / "target"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TARGET_CONFIG), encoding="utf-8")
    return str(directory)


def write(tmp_path: Path, **speculative: object) -> str:
    tree = {"use_dynamic_tree": True} if "dynamic_tree_max_topK" in speculative else {}
    section = (
        {"decoding_type": "Eagle3", "max_draft_len": 5, "speculative_model": "demo"} | tree | speculative
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": "demo", "speculative_config": section}), encoding="utf-8")
    return str(path)


def table_rows(out: str) -> dict[str, str]:
    cells = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if "│" in line]
    return {cell[1]: cell[2] for cell in cells}


def test_the_demo_is_ok_and_the_table_says_what_was_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capsys, DEMO, "--host", "embedded")
    assert (code, err) == (0, [])
    rows = table_rows(out)
    assert rows["result"] == "OK" and rows["host"] == "embedded" and rows["speculation"] == "draft tree"
    assert out.splitlines()[-1].endswith("OK for host embedded"), "the verdict is not the last line"
    sizes = (rows["tree_topk (K)"], rows["num_steps (S)"], rows["num_nodes (N)"])
    assert sizes == ("4", "5", "32")
    assert (rows["mask_words"], rows["lane_window"], rows["num_entries"]) == ("1", "16", "68")


@pytest.mark.parametrize("host", ["embedded", "tensorrt_llm"])
@pytest.mark.parametrize("name", ["tree_eagle", "tree_eagle_fp8", "tree_mla"])
def test_a_tree_config_needs_only_a_head_and_runs_on_both_hosts(
    capsys: pytest.CaptureFixture[str], target: str, name: str, host: str
) -> None:
    path = TREE_EAGLE.replace("tree_eagle", name)
    code, _, err = check(capsys, path, "--host", host)
    assert code == 1 and len(err) == 1 and "path/to/eagle3-head" in err[0]
    head = str(resolve_head("demo"))
    for model in ([], ["--model", target]):
        assert check(capsys, path, "--host", host, "--speculative-model", head, *model)[0] == 0


@pytest.mark.parametrize("host", ["embedded", "tensorrt_llm"])
def test_the_mla_config_goes_with_an_mla_target(
    capsys: pytest.CaptureFixture[str], target: str, host: str
) -> None:
    config = TARGET_CONFIG | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (Path(target) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    path, head = TREE_EAGLE.replace("tree_eagle", "tree_mla"), str(resolve_head("demo"))
    assert check(capsys, path, "--host", host, "--speculative-model", head, "--model", target)[0] == 0


@pytest.mark.parametrize("host", ["embedded", "tensorrt_llm"])
def test_the_mtp_config_names_no_head_and_runs_on_both_hosts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str
) -> None:
    path = TREE_EAGLE.replace("tree_eagle", "tree_mtp")
    model = str(tiny_mtp_dir(tmp_path, "glm4_moe"))
    for options in ([], ["--model", model]):
        assert check(capsys, path, "--host", host, *options)[0] == 0


@pytest.mark.parametrize(
    ("host", "config", "rule"),
    [
        ("embedded", {}, "has no MTP layer"),
        ("tensorrt_llm", {}, "has no MTP layer"),
        ("embedded", {"num_nextn_predict_layers": 1}, "deepseek_v3 and glm4_moe, not of qwen3"),
        ("tensorrt_llm", {"num_nextn_predict_layers": 1}, "glm4_moe and nemotron_h, not of qwen3"),
    ],
)
def test_the_mtp_config_with_a_target_that_has_no_such_layer_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], target: str, host: str, config: dict[str, object], rule: str
) -> None:
    written = TARGET_CONFIG | {"model_type": "qwen3"} | config
    (Path(target) / "config.json").write_text(json.dumps(written), encoding="utf-8")
    path = TREE_EAGLE.replace("tree_eagle", "tree_mtp")
    code, _, err = check(capsys, path, "--host", host, "--model", target)
    assert code == 1 and len(err) == 1
    assert err[0].startswith("speculative_config.decoding_type = 'MTP'") and rule in err[0]


def test_an_mtp_checkpoint_is_searched_for_its_layer_and_everything_is_said_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = tiny_mtp_dir(tmp_path, "deepseek_v3")
    drop_tensors(model, "layers.3.eh_proj.weight", "layers.3.mlp.experts.5.up_proj.weight")
    set_config(model, num_nextn_predict_layers=2)
    capsys.readouterr()
    path = TREE_EAGLE.replace("tree_eagle", "tree_mtp")
    code, _, err = check(capsys, path, "--host", "embedded", "--model", str(model))
    assert code == 1 and len(err) == 2
    text = " ".join(err)
    assert "num_nextn_predict_layers = 2" in text and "must be 1" in text
    assert "model.layers.3" in text and "lacks eh_proj.weight, mlp.experts.5.up_proj.weight" in text


@pytest.mark.parametrize(
    ("keys", "option", "remedy"),
    [
        ({"dynamic_tree_max_topK": 0}, "dynamic_tree_max_topK", "Set dynamic_tree_max_topK to 1."),
        ({"dynamic_tree_max_topK": 17}, "dynamic_tree_max_topK", "Set dynamic_tree_max_topK to 16."),
        ({"dynamic_tree_max_topK": True}, "dynamic_tree_max_topK", "Set dynamic_tree_max_topK to 4."),
        ({"max_draft_len": 0}, "max_draft_len", "Set max_draft_len to 1."),
        ({"max_draft_len": 11}, "max_draft_len", "Set max_draft_len to 10."),
        ({"max_draft_len": None}, "max_draft_len", "Set max_draft_len to 5."),
        ({"max_total_draft_tokens": 6}, "max_total_draft_tokens", "Set max_total_draft_tokens to 5."),
        (
            {"dynamic_tree_max_topK": 4, "max_total_draft_tokens": 14},
            "max_total_draft_tokens",
            "Set max_total_draft_tokens to 15.",
        ),
        (
            {"dynamic_tree_max_topK": 4, "max_total_draft_tokens": 69},
            "max_total_draft_tokens",
            "Set max_total_draft_tokens to 68.",
        ),
        (
            {"dynamic_tree_max_topK": 16, "max_total_draft_tokens": 256},
            "max_total_draft_tokens",
            "Set max_total_draft_tokens to 255.",
        ),
        ({"use_dynamic_tree": True}, "use_dynamic_tree", "Set dynamic_tree_max_topK to 4."),
        (
            {"use_dynamic_tree": False, "dynamic_tree_max_topK": 4},
            "use_dynamic_tree",
            "Set use_dynamic_tree to true, or remove dynamic_tree_max_topK for a chain.",
        ),
        (
            {"use_dynamic_tree": None, "dynamic_tree_max_topK": 4},
            "use_dynamic_tree",
            "Set use_dynamic_tree to true, or remove dynamic_tree_max_topK for a chain.",
        ),
        ({"decoding_type": "Eagle"}, "decoding_type", "Set decoding_type to Eagle3."),
        ({"tree_topk": 4}, "tree_topk", "Write dynamic_tree_max_topK."),
        ({"max_draft_length": 4}, "max_draft_length", "Did you mean max_draft_len?"),
        (
            {"eagle3_one_model": False},
            "eagle3_one_model",
            "Remove eagle3_one_model or set it to True, or run on TensorRT-LLM.",
        ),
        (
            {"use_rejection_sampling": "yes"},
            "use_rejection_sampling",
            "Set use_rejection_sampling to false.",
        ),
    ],
)
def test_a_wrong_tree_option_is_refused_with_what_to_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: dict[str, object], option: str, remedy: str
) -> None:
    code, report = check_json(capsys, write(tmp_path, **keys), "--host", "embedded")
    assert code == 1 and not report["ok"]
    (problem,) = report["problems"]
    assert problem["option"] == f"speculative_config.{option}"
    assert problem["value"] == keys[option] and problem["remedy"] == remedy


def test_a_good_tree_and_a_good_chain_pass(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = check_json(
        capsys, write(tmp_path, dynamic_tree_max_topK=16, max_total_draft_tokens=255), "--host", "embedded"
    )
    assert (code, report["problems"]) == (0, [])
    assert (report["resolved"]["num_nodes"], report["resolved"]["mask_words"]) == (256, 4)
    code, report = check_json(capsys, write(tmp_path), "--host", "embedded")
    assert (code, report["resolved"]["speculation"], report["resolved"]["num_nodes"]) == (0, "chain", 6)


def test_all_problems_of_all_layers_come_at_once_one_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path, dynamic_tree_max_topK=20, sa_config={"threshold": 3}, speculative_model="nowhere")
    with open(path, "a", encoding="utf-8") as file:
        file.write("dtpe: auto\nattn_backend: VANILLA\nkv_cache_config: {enable_block_reuse: true}\n")
    code, out, err = check(capsys, path, "--model", str(tmp_path / "gone"), "--host", "embedded")
    assert code == 1 and out == ""
    options = [line.split(" = ")[0] for line in err]
    assert sorted(options) == [
        "attn_backend",
        "dtpe",
        "kv_cache_config.enable_block_reuse",
        "model",
        "speculative_config.dynamic_tree_max_topK",
        "speculative_config.sa_config",
        "speculative_model",
    ]
    assert any(line.endswith("Did you mean dtype?") for line in err)


def test_each_host_has_its_own_rules(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str) -> None:
    head = str(resolve_head("demo"))
    path = write(tmp_path, dynamic_tree_max_topK=4, max_total_draft_tokens=31, speculative_model=head)
    assert check(capsys, path, "--model", target, "--host", "embedded")[0] == 0
    code, out, err = check(capsys, path, "--model", target, "--host", "tensorrt_llm")
    assert code == 1 and table_rows(out)["result"] == "1 problem"
    assert "OK" not in out.splitlines()[-1]
    assert len(err) == 1 and "Set max_total_draft_tokens to 20" in err[0]
    # Limits that the file leaves open are not the embedded host's there.
    assert "max_batch_size" not in out


def test_a_model_needs_a_directory_with_a_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str
) -> None:
    path = write(tmp_path)
    assert check(capsys, path, "--model", target, "--host", "embedded")[0] == 0
    for name in (str(tmp_path / "gone"), str(tmp_path)):
        code, _, err = check(capsys, path, "--model", name, "--host", "embedded")
        assert code == 1 and err[0].startswith(f"model = {name!r}: must be a directory with a config.json")


def test_a_head_for_another_target_is_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str
) -> None:
    (Path(target) / "config.json").write_text(
        json.dumps(TARGET_CONFIG | {"hidden_size": 2048}), encoding="utf-8"
    )
    code, _, err = check(capsys, write(tmp_path), "--model", target, "--host", "embedded")
    assert code == 1 and any("576" in line and "2048" in line for line in err)


def test_a_broken_head_is_found_without_a_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    shutil.copy(resolve_head("demo") / "config.json", head)
    code, _, err = check(capsys, TREE_EAGLE, "--speculative-model", str(head), "--host", "embedded")
    assert code == 1 and any("safetensors" in line for line in err)


def test_tensorrt_llm_knows_hub_names_but_not_the_demo(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hub = ["--model", "owner/model", "--speculative-model", "owner/head"]
    assert check(capsys, TREE_EAGLE, *hub, "--host", "tensorrt_llm")[0] == 0
    assert check(capsys, TREE_EAGLE, *hub, "--host", "embedded")[0] == 1
    code, report = check_json(capsys, write(tmp_path), "--host", "tensorrt_llm")
    assert code == 1
    assert [problem["option"] for problem in report["problems"]] == [
        "model",
        "speculative_config.speculative_model",
    ]


def test_a_missing_file_and_bad_yaml_are_lines_not_tracebacks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = check(capsys, str(tmp_path / "none.yaml"), "--host", "embedded")
    assert code == 1 and len(err) == 1 and "cannot be read" in err[0]
    bad = tmp_path / "bad.yaml"
    bad.write_text("model: [a\nb: c\n", encoding="utf-8")
    code, _, err = check(capsys, str(bad), "--host", "embedded")
    assert code == 1 and len(err) == 1 and "line 2" in err[0]


@pytest.mark.parametrize("text", ["", "# model: owner/name\n", "model:\nspeculative_config:\n"])
def test_a_file_that_asks_for_nothing_is_not_ok_unless_a_model_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str, text: str
) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(text, encoding="utf-8")
    code, _, err = check(capsys, str(path), "--host", "embedded")
    assert code == 1 and err[0].startswith(f"config file = {str(path)!r}: names no model")
    assert check(capsys, str(path), "--host", "embedded", "--model", target)[0] == 0
    path.write_text("max_batch_size: 8\n", encoding="utf-8")
    assert check(capsys, str(path), "--host", "embedded")[0] == 0


@pytest.mark.parametrize("argv", [[], ["chekc"], ["check"], ["check", DEMO, "--host", "vllm"]])
def test_wrong_usage_leaves_with_code_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2 and "usage: trtllm-tree" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"trtllm-tree {__version__}\n"


def test_the_process_exits_with_the_code_and_prints_problems_on_stderr(tmp_path: Path) -> None:
    path = write(tmp_path, dynamic_tree_max_topK=99)
    command = [sys.executable, "-m", "trtllm_tree", "check", path, "--host", "embedded"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines() == [
        "speculative_config.dynamic_tree_max_topK = 99: 1 <= dynamic_tree_max_topK <= 16."
        " Set dynamic_tree_max_topK to 16."
    ]
