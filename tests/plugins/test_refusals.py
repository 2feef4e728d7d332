"""A TensorRT-LLM that the plugin does not fit: nothing while trees are off, one collected refusal when they are on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doubles.tensorrt_llm import Entry, double_entries, double_version, write_double
from tests.plugins.conftest import PROJECT, Environment
from tests.plugins.standin import write_standin, write_torch

REFUSED = """
try:
    import tensorrt_llm
except Exception as error:
    print(type(error).__name__)
    print(error)
"""


def write_incomplete(root: Path, layout: str, *missing: str) -> Path:
    """The contract double without these symbols. What is left raises when it is called, register_auto_model too."""

    def kept(entry: Entry) -> Entry:
        return entry | {"kind": "absent"} if entry["name"] in missing else entry

    write_double(root, [kept(entry) for entry in double_entries(layout)], double_version(layout))
    write_torch(root)
    return root


@pytest.mark.parametrize("layout", ["new", "old"])
def test_missing_symbols_are_nothing_while_trees_are_off_and_one_refusal_when_they_are_on(
    environment: Environment, tmp_path: Path, layout: str
) -> None:
    missing = ("register_auto_model", "FMHA_LIBS", "DynamicTreeSlotStorage")
    root = write_incomplete(tmp_path, layout, *missing)
    code = "import tensorrt_llm, tensorrt_llm._torch.models.modeling_utils\nprint('imported')"
    off = environment.run(code, root)
    assert off.stdout.splitlines()[-1] == "imported" and off.stderr == ""
    lines = environment.run(REFUSED, root, TLLM_TREE_ENABLE="1").stdout.splitlines()
    assert "UnsupportedError" in lines
    problems = [line for line in lines if " = '" in line]
    assert [name for name in missing if not any(name in line for line in problems)] == []
    assert all(double_version(layout) in line for line in problems) and len(problems) == len(missing)


def test_a_failure_that_no_symbol_explains_is_loud_too_when_trees_are_on(
    environment: Environment, tmp_path: Path
) -> None:
    root = write_incomplete(tmp_path, "new")
    off = environment.run("import tensorrt_llm._torch.models.modeling_utils", root)
    assert off.stderr == ""
    lines = environment.run(REFUSED, root, TLLM_TREE_ENABLE="1").stdout.splitlines()
    assert "HostError" in lines and "NotImplementedError: contract double" in lines[-1]


def test_the_refusal_is_repeated_when_the_import_is(environment: Environment, tmp_path: Path) -> None:
    root = write_incomplete(tmp_path, "new", "register_auto_model")
    lines = environment.run(REFUSED * 2, root, TLLM_TREE_ENABLE="1").stdout.splitlines()
    assert lines.count("UnsupportedError") == 2


def test_a_broken_plugin_costs_one_line_while_trees_are_off(environment: Environment, tmp_path: Path) -> None:
    write_torch(tmp_path)
    write_standin(tmp_path, "eager")
    code = "import sys; sys.modules['trtllm_tree'] = None; import tensorrt_llm; print('imported')"
    off = environment.run(code, tmp_path)
    assert off.stdout == "imported\n" and len(off.stderr.splitlines()) == 1
    assert off.stderr.startswith("[trtllm_tree] not loaded: ModuleNotFoundError")
    on = environment.run(code, tmp_path, check=False, TLLM_TREE_ENABLE="1")
    assert on.returncode != 0 and "ModuleNotFoundError" in on.stderr


BUILD = """
import os
from types import SimpleNamespace
from transformers import LlamaConfig
from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING
model = MODEL_CLASS_MAPPING["LlamaForCausalLM"]
def build(topk):
    tree = SimpleNamespace(use_dynamic_tree=topk > 1, dynamic_tree_max_topK=topk, max_draft_len=3,
                           max_total_draft_tokens=7, decoding_type="Eagle3", speculative_model="head")
    target = LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=1)
    try:
        built = model(SimpleNamespace(spec_config=tree, mapping=SimpleNamespace(rank=0), pretrained_config=target))
        print(type(built).__name__, built.spec_worker, os.environ.get("TLLM_FMHA_LIBS"))
    except Exception as error:
        missing = [problem for problem in getattr(error, "problems", [error]) if "is not there" in str(problem)]
        print(type(error).__name__, len(missing) > 5, error if not missing else "")
os.environ["TLLM_FMHA_LIBS"] = "+trtllm_tree,-fallback"
build(4)
# As env_overrides come: after the import.
os.environ["TLLM_TREE_ENABLE"] = "1"
build(4)
build(1)
os.environ["TLLM_TREE_DISABLE"] = "1"
build(4)
"""


def test_a_model_is_the_built_in_one_until_trees_are_on_and_then_refused_with_all_that_it_lacks(
    environment: Environment, tmp_path: Path
) -> None:
    write_standin(tmp_path, "eager")
    assert environment.run(BUILD, tmp_path).stdout.splitlines() == [
        "TreeLlamaForCausalLM built in +trtllm_tree,-fallback",
        "UnsupportedError True ",
        # A chain has nothing to do with our library, which nobody registered.
        "TreeLlamaForCausalLM built in -fallback",
        "TreeLlamaForCausalLM built in -fallback",
    ]


CUSTOM_MODULE = f"""
import sys
# No hook: as where Python does not read .pth files.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "trtllm_tree_startup"]
# What --custom_module_dirs does with a folder.
sys.path.insert(0, {str(PROJECT / "plugins")!r})
try:
    import trtllm_tree_plugin
    from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING
    print(MODEL_CLASS_MAPPING["LlamaForCausalLM"].__name__)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_the_explicit_plugin_registers_without_the_hook(environment: Environment, tmp_path: Path) -> None:
    write_torch(tmp_path)
    for layout in ("eager", "lazy"):
        write_standin(tmp_path, layout)
        assert environment.run(CUSTOM_MODULE, tmp_path).stdout == "TreeLlamaForCausalLM\n"


def test_the_explicit_plugin_is_loud_even_while_trees_are_off(
    environment: Environment, tmp_path: Path
) -> None:
    root = write_incomplete(tmp_path, "new", "register_auto_model")
    line = environment.run(CUSTOM_MODULE, root).stdout.splitlines()[-1]
    assert line.startswith("UnsupportedError") and "register_auto_model" in line
