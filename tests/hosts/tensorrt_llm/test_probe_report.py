"""What the probe reports of a whole installation: many mismatches, no dynamic trees, a broken package, none at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.tensorrt_llm import double_entries, module_path
from tests.hosts.tensorrt_llm.conftest import Install, assert_one_mismatch
from trtllm_tree.errors import HostUnavailableError, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm import probe as probing
from trtllm_tree.hosts.tensorrt_llm.parameters import SymbolMismatch, checked_parameters
from trtllm_tree.hosts.tensorrt_llm.probe import NOT_INSTALLED, TREE_REMEDY, probe
from trtllm_tree.hosts.tensorrt_llm.symbols import FEATURES, SYMBOLS
from trtllm_tree.support.report import Refused, Supported

ROOT = Path(__file__).parents[3]
FEATURE_IDS = {feature.id for feature in FEATURES}


def test_everything_that_is_wrong_is_reported_at_once(install_double: Install) -> None:
    entries = double_entries("new")
    by_name = {entry["name"]: entry for entry in entries}
    by_name["FMHA_LIBS"]["kind"] = "absent"
    by_name["KVCacheManager"]["methods"]["get_buffers"] = ["self", "layer", "layout='NHD'"]
    by_name["LlamaForCausalLM"]["base"] = "object"
    entries = [entry for entry in entries if not entry["module"].endswith("modeling_utils")]
    root = install_double(entries, "new")
    broken = module_path(root, "tensorrt_llm._torch.speculative.spec_tree_manager")
    broken.write_text("raise OSError('libcuda.so.1: no such file')", encoding="utf-8")
    report = probe()
    torch = "tensorrt_llm._torch"
    expected = {
        f"{torch}.models.modeling_utils": "is not there",
        f"{torch}.speculative.spec_tree_manager": "cannot be imported: OSError: libcuda.so.1: no such file",
        f"{torch}.attention.backends.fmha.registry.FMHA_LIBS": "FMHA_LIBS is missing (there is DEFAULT_FMHA_LIBS)",
        f"{torch}.pyexecutor.resource_manager.KVCacheManager.get_buffers": (
            "parameter layer_idx is missing (there is layer); parameter kv_layout is missing (there is layout)"
        ),
        f"{torch}.models.modeling_llama.LlamaForCausalLM": (
            "is no SpecDecOneEngineForCausalLM, so it owns no worker that ours could replace"
        ),
    }
    assert {found.path: found.rule for found in report.mismatches} == expected
    with pytest.raises(UnsupportedError) as caught:
        report.require("trees")
    lines = str(caught.value).splitlines()
    # Llama is another feature's business.
    assert len(lines) == 4 and all("'1.4.0rc1'" in line for line in lines)
    assert report.answer("model:Qwen3ForCausalLM") == report.answer("trees") != Supported()
    report.require("chain", "llm_api", "drafter")


def test_without_dynamic_trees_there_is_a_chain_and_trees_are_refused_with_the_reason(
    install_double: Install,
) -> None:
    install_double(double_entries("1.2.1"), "1.2.1")
    report = probe()
    report.require("chain", "llm_api", "serve", "drafter")
    chain = report.resolved["chain", "Eagle3DecodingConfig"]
    assert chain.parameters["speculative_model"] == "speculative_model_dir"
    answer = report.answer("trees")
    assert isinstance(answer, Refused)
    for reason in (
        "attention.backends.fmha.registry: is not there, nor under its older path",
        "DynamicTreeSlotStorage is missing",
    ):
        assert reason in answer.reason
    with pytest.raises(UnsupportedError) as caught:
        report.require("trees")
    assert {problem.value for problem in caught.value.problems} == {"1.2.1"}
    assert {problem.remedy for problem in caught.value.problems} == {TREE_REMEDY}
    for feature in ("mtp", "hybrid", "mla", "model:LlamaForCausalLM"):
        assert isinstance(report.answer(feature), Refused)


def test_no_tensorrt_llm_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing.importlib.util, "find_spec", lambda name: None)
    report = probe()
    assert report.version is None and report.mismatches == ()
    assert all(report.answer(feature) == Refused(NOT_INSTALLED) for feature in FEATURE_IDS)
    (problem,) = report.problems("trees")
    assert problem.option == "tensorrt_llm" and problem.rule == NOT_INSTALLED
    with pytest.raises(HostUnavailableError, match="not installed"):
        report.require("chain")


def test_a_package_that_does_not_load_is_one_mismatch_of_all_features(install_double: Install) -> None:
    root = install_double(double_entries("new"), "new")
    text = "import missing_native_library"
    (root / "tensorrt_llm/__init__.py").write_text(text, encoding="utf-8")
    report = probe()
    assert_one_mismatch(report, "tensorrt_llm", FEATURE_IDS)
    assert "ModuleNotFoundError" in report.mismatches[0].rule and "missing_native_library" in str(
        report.problems()
    )


def test_a_final_method_cannot_stand_in_for_the_hook_that_we_override(install_double: Install) -> None:
    entries = double_entries("new")
    (fmha,) = (entry for entry in entries if entry["name"] == "Fmha")
    del fmha["methods"]["_is_supported"]
    install_double(entries, "new")
    assert_one_mismatch(probe(), f"{fmha['module']}.Fmha._is_supported", {"fmha"})


def test_a_metaclass_that_takes_anything_does_not_hide_a_constructor() -> None:
    class Hiding(type):
        def __call__(cls, *args: object, **kwargs: object) -> object:
            return type.__call__(cls, *args, **kwargs)

    class Model(metaclass=Hiding):
        def __init__(self, config_of_model: object) -> None:
            self.config = config_of_model

    (symbol,) = (symbol for symbol in SYMBOLS if symbol.name == "LlamaForCausalLM")
    with pytest.raises(SymbolMismatch) as caught:
        checked_parameters(symbol, Model, Model, "there.Model")
    assert (caught.value.path, caught.value.rule) == ("there.Model", "parameter model_config is missing")


def test_the_probe_is_imported_without_tensorrt_llm_and_torch(install_double: Install) -> None:
    root = install_double(double_entries("new"), "new")
    code = f"""
import sys
sys.path.insert(0, {str(root)!r})
import trtllm_tree.hosts.tensorrt_llm.probe as probing
assert not {{"torch", "tensorrt_llm"}} & set(sys.modules)
assert probing.probe().mismatches == () and "tensorrt_llm" in sys.modules and "torch" not in sys.modules
"""
    # The start-up hook would register our models, and import torch for them.
    env = os.environ | {"TLLM_TREE_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, capture_output=True)


@pytest.mark.tensorrt_llm
@pytest.mark.filterwarnings("ignore")
def test_the_installed_tensorrt_llm_offers_draft_trees() -> None:
    report = probe()
    report.require("chain", "llm_api", "serve", "trees", "model:LlamaForCausalLM")
