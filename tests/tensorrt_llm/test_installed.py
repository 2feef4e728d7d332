"""The installed TensorRT-LLM against what the plugin asks of it, without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tensorrt_llm.contract import closest_layout
from tests.tensorrt_llm.engines import ROOT, Pair
from trtllm_tree.cli.main import main
from trtllm_tree.hosts.tensorrt_llm.probe import probe
from trtllm_tree.hosts.tensorrt_llm.symbols import FEATURES

# TensorRT-LLM and what it imports warn of much.
pytestmark = [pytest.mark.tensorrt_llm, pytest.mark.filterwarnings("ignore")]
CONFIGS = sorted((ROOT / "configs").glob("tree_*.yaml"))


def test_every_symbol_that_a_tree_on_llama_needs_is_there() -> None:
    report = probe()
    for feature in FEATURES:
        print(f"{feature.id}: {report.answer(feature.id)}")
    for mismatch in report.mismatches:
        print(f"{mismatch.path}: {mismatch.rule}")
    report.require("chain", "llm_api", "serve", "trees", "model:LlamaForCausalLM")


def test_every_symbol_that_a_tree_from_mtp_layers_needs_is_there() -> None:
    names = ("Glm4MoeForCausalLM", "NemotronHForCausalLM")
    probe().require(*(f"{part}:{name}" for part in ("mtp", "model") for name in names))


def test_the_double_says_of_signatures_what_the_package_says() -> None:
    layout, found = closest_layout()
    print(f"most like the double's layout {layout!r}")
    assert found == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_are_valid_for_its_models(path: Path, pair: Pair) -> None:
    llm_args: Any = importlib.import_module("tensorrt_llm.llmapi.llm_args")
    options = yaml.safe_load(path.read_text(encoding="utf-8"))
    section = options["speculative_config"]
    if "speculative_model" in section:
        section["speculative_model"] = pair.head
    args = llm_args.TorchLlmArgs(model=pair.model, **options)
    assert args.speculative_config.max_draft_len == section["max_draft_len"]
    assert args.speculative_config.use_dynamic_tree


def test_check_finds_nothing_against_a_tree(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "tree_eagle.yaml")
    code = main(
        ["check", config, "--host", "tensorrt_llm", "--model", pair.model, "--speculative-model", pair.head]
    )
    assert code == 0, capfd.readouterr()
