"""What loads without torch: the package, its config and support layers, and `check`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trtllm_tree

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "triton", "transformers", "tensorrt_llm"}
REPORT = f"import sys; print(sorted({HEAVY!r} & set(sys.modules)))"


def run_python(*argv: str) -> str:
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def test_the_package_its_config_and_its_head_check_load_nothing_heavy() -> None:
    code = "import trtllm_tree, trtllm_tree.config, trtllm_tree.support.head, trtllm_tree.errors"
    # LLM too: beside TensorRT-LLM, transformers may be too old for the embedded host.
    names = (
        "trtllm_tree.SpeculativeConfig, trtllm_tree.load_config, trtllm_tree.RequestOutput, trtllm_tree.LLM"
    )
    assert run_python("-c", f"{code}; {names}; {REPORT}") == "[]"


def test_check_loads_nothing_heavy() -> None:
    argv = "sys.argv = ['trtllm-tree', 'check', 'configs/demo.yaml', '--host', 'embedded']"
    code = f"""
import runpy, sys
{argv}
try:
    runpy.run_module("trtllm_tree", run_name="__main__")
except SystemExit as leave:
    assert leave.code == 0
{REPORT}
"""
    assert run_python("-c", code) == "[]"


def test_public_names_are_resolved_on_first_use() -> None:
    assert set(trtllm_tree.__all__) == {*trtllm_tree._HOMES, "__version__"}
    assert dir(trtllm_tree) == sorted(trtllm_tree.__all__)
    from trtllm_tree.config import SpeculativeConfig
    from trtllm_tree.outputs import AcceptanceStats

    # What comes out of it without TensorRT-LLM.
    assert issubclass(trtllm_tree.SpeculativeConfig, SpeculativeConfig)
    assert type(trtllm_tree.SpeculativeConfig()) is SpeculativeConfig
    assert trtllm_tree.AcceptanceStats is AcceptanceStats
    with pytest.raises(AttributeError, match="nothing"):
        trtllm_tree.nothing  # noqa: B018


WITHOUT_THE_EXTRA = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {packages!r} else found(name, package)
"""


def test_without_the_extra_the_embedded_host_says_what_to_install_and_the_other_host_loads() -> None:
    missing = WITHOUT_THE_EXTRA.format(packages={"gguf", "jinja2", "tokenizers", "transformers"})
    modules = "attention, draft_model, kv, plugin, refusals, slots, worker"
    code = f"""
{missing}
from trtllm_tree import LLM, HostUnavailableError
from trtllm_tree.hosts.tensorrt_llm import {modules}
try:
    LLM("demo")
except HostUnavailableError as error:
    print(error)
"""
    said = run_python("-c", code)
    assert "transformers is not installed" in said and "gguf is not installed" in said
    assert "pip install 'trtllm_tree[embedded]'" in said


def test_an_older_transformers_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_tree import HostUnavailableError
    from trtllm_tree.hosts import embedded

    monkeypatch.setattr(embedded, "version", lambda name: "4.57.1")
    with pytest.raises(HostUnavailableError, match=r"transformers is 4\.57\.1 and must be 5\.x"):
        embedded.require_packages()
