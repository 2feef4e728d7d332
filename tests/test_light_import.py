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
    names = "trtllm_tree.SpeculativeConfig, trtllm_tree.load_config, trtllm_tree.RequestOutput"
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

    assert trtllm_tree.SpeculativeConfig is SpeculativeConfig
    assert trtllm_tree.AcceptanceStats is AcceptanceStats
    with pytest.raises(AttributeError, match="nothing"):
        trtllm_tree.nothing  # noqa: B018
