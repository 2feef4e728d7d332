"""`trtllm-tree serve`: what it checks before, what it hands to trtllm-serve, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts.tensorrt_llm.tree_runs import tree_double
from tests.mtp_models import tiny_mtp_dir
from trtllm_tree.cli.main import main
from trtllm_tree.hosts.tensorrt_llm import plugin

CONFIGS = Path(__file__).parents[2] / "configs"
SECTION = {
    "decoding_type": "Eagle3",
    "max_draft_len": 3,
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 2,
    "max_total_draft_tokens": 5,
    # The head's own; the target is too small for the usual ones.
    "eagle3_layers_to_capture": [0, 1, 2],
}


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TensorRT-LLM with its trtllm-serve; variables and arguments of this process are put back."""
    monkeypatch.setattr(sys, "argv", ["trtllm-tree"])
    before = dict(os.environ)
    with tree_double(tmp_path / "double", "new", monkeypatch):
        for name in ("TLLM_TREE_ENABLE", "TLLM_FMHA_LIBS"):
            monkeypatch.delenv(name, raising=False)
        yield
    os.environ.clear()
    os.environ.update(before)


def config(tmp_path: Path, head: Path, **changes: Any) -> str:
    path = tmp_path / "run.yaml"
    section = SECTION | {"speculative_model": str(head)} | changes.pop("speculative_config", {})
    path.write_text(yaml.safe_dump({"speculative_config": section, **changes}), encoding="utf-8")
    return str(path)


def serve(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["serve", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_embedded_host_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = serve(capsys, "--host", "embedded", "MODEL", "--config", str(CONFIGS / "demo.yaml"))
    assert code == 1 and "--host = 'embedded': the embedded host has no server yet." in err


def test_without_tensorrt_llm_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = serve(capsys, "MODEL", "--config", str(CONFIGS / "tree_eagle.yaml"))
    assert code == 1 and "TensorRT-LLM is not installed here. Install tensorrt_llm" in err
    # It would be refused.
    assert "embedded" not in err


def test_the_servers_address_before_the_model_is_told_from_the_runtime(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = serve(capsys, "--host", "0.0.0.0", "MODEL")
    assert code == 1 and "--host = '0.0.0.0': must be tensorrt_llm before MODEL" in err
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "embedded" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--config", "--extra_llm_api_options"])
@pytest.mark.parametrize("before", [True, False])
def test_trtllm_serve_runs_with_the_file_and_the_plugin(
    double: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_target: Path,
    tiny_head: Path,
    option: str,
    before: bool,
) -> None:
    served: list[Any] = []
    registered_by: list[dict[str, Any]] = []
    register = plugin.register

    def noted(**options: Any) -> None:
        registered_by.append(options)
        register(**options)

    monkeypatch.setattr(plugin, "register", noted)

    def server() -> None:
        assert registered_by == [{"required": True}]
        registered = import_module("tensorrt_llm._torch.models.modeling_utils").MODEL_CLASS_MAPPING
        served.append(registered["LlamaForCausalLM"])

    monkeypatch.setattr(import_module("tensorrt_llm.commands.serve"), "main", server)
    file, model = [option, config(tmp_path, tiny_head)], str(tiny_target)
    argv = ["--host", "tensorrt_llm", *file, model] if before else [model, *file]
    assert serve(capsys, *argv)[0] == 0
    (model_class,) = served
    assert model_class.__module__ == "trtllm_tree.hosts.tensorrt_llm.models"
    # The file says nothing of it; ranks get it all the same.
    assert (os.environ["TLLM_TREE_ENABLE"], os.environ["TLLM_FMHA_LIBS"]) == ("1", "+trtllm_tree")
    assert sys.argv == ["trtllm-serve", model, "--extra_llm_api_options", file[1]]


def test_the_worker_that_is_served_is_ours(
    double: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_target: Path,
    tiny_head: Path,
) -> None:
    monkeypatch.setenv("TLLM_DOUBLE_DEVICE", "cpu")
    path = config(tmp_path, tiny_head, dtype="float32", max_seq_len=64, max_batch_size=1)
    code, out, _ = serve(capsys, str(tiny_target), "--config", path)
    assert code == 0
    report = json.loads(out.splitlines()[-1])
    assert report["worker"] == "TreeEagleWorker" and report["fmha_libs"][0] == "TreeCascadeFmha"
    assert report["speculative_config"]["max_total_draft_tokens"] == 5


def test_what_stands_behind_the_model_is_passed_on_as_it_is(
    double: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, seen = import_module("tensorrt_llm.commands.serve"), []
    monkeypatch.setattr(module, "main", lambda: seen.append(list(sys.argv)))
    code, _, _ = serve(capsys, "owner/name", "--host", "0.0.0.0", "--port", "8000", "--tp_size=2")
    assert code == 0
    assert seen == [["trtllm-serve", "owner/name", "--host", "0.0.0.0", "--port", "8000", "--tp_size=2"]]
    # Nothing asked for a tree.
    assert "TLLM_TREE_ENABLE" not in os.environ


@pytest.mark.parametrize(("leave", "code"), [(0, 0), (None, 0), (2, 2), ("no such model", 1)])
def test_its_exit_code_is_that_of_trtllm_serve(
    double: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    leave: Any,
    code: int,
) -> None:
    def ends() -> None:
        raise SystemExit(leave)

    monkeypatch.setattr(import_module("tensorrt_llm.commands.serve"), "main", ends)
    assert serve(capsys, "owner/name")[0] == code


def test_everything_wrong_with_a_config_is_reported_before_anything_starts(
    double: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_target: Path,
) -> None:
    monkeypatch.setattr(import_module("tensorrt_llm.commands.serve"), "main", lambda: pytest.fail("started"))
    path = config(
        tmp_path,
        tmp_path / "nowhere",
        speculative_config={"max_total_draft_tokens": 7, "sa_config": {"threshold": 4}},
        pipeline_parallel_size=2,
        tree_topk=4,
        env_overrides={"TLLM_TREE_VERIFY": "typical"},
    )
    code, _, err = serve(capsys, str(tiny_target), "--config", path)
    assert code == 1 and "TLLM_TREE_ENABLE" not in os.environ
    for words in (
        "max_total_draft_tokens = 7",
        "sa_config",
        "pipeline_parallel_size = 2",
        "tree_topk = 4",
        "nowhere",
        "TLLM_TREE_VERIFY = 'typical'",
    ):
        assert sum(words in line for line in err.splitlines()) == 1, words


def test_a_head_of_other_layers_than_tensorrt_llm_takes_must_say_so(
    double: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_target: Path, tiny_head: Path
) -> None:
    path = config(tmp_path, tiny_head, speculative_config={"eagle3_layers_to_capture": None})
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    del content["speculative_config"]["eagle3_layers_to_capture"]
    Path(path).write_text(yaml.safe_dump(content), encoding="utf-8")
    code, _, err = serve(capsys, str(tiny_target), "--config", path)
    assert code == 1 and "Set eagle3_layers_to_capture to [0, 1, 2]." in err


def test_two_config_files_are_one_too_many(double: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = serve(capsys, "--config", "a.yaml", "MODEL", "--extra_llm_api_options", "b.yaml")
    assert code == 1 and "--config = 'b.yaml': is given twice" in err


def test_a_version_without_what_a_tree_needs_is_refused_together(
    double: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_target: Path,
    tiny_head: Path,
) -> None:
    registry = import_module("tensorrt_llm._torch.attention.backends.fmha.registry")
    monkeypatch.delattr(registry, "FMHA_LIBS")
    monkeypatch.delattr(import_module("tensorrt_llm.commands.serve"), "main")
    code, _, err = serve(capsys, str(tiny_target), "--config", config(tmp_path, tiny_head))
    assert code == 1 and "FMHA_LIBS" in err and "tensorrt_llm.commands.serve.main" in err


def test_a_tree_from_an_mtp_layer_needs_more_of_a_version(
    double: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tiny_mtp_dir(tmp_path, "glm4_moe", head_dim=64)
    monkeypatch.delattr(import_module("tensorrt_llm._torch.distributed.ops"), "allgather")
    code, _, err = serve(capsys, str(target), "--config", str(CONFIGS / "tree_mtp.yaml"))
    assert code == 1 and "allgather" in err
