"""Every kernel compiles for Hopper and Blackwell without a GPU, and keeps its registers out of memory.

Ops are found by their folders: one without `aot_specs()`, or whose specs leave out a kernel, fails here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.kernels import aot_compile

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[90, 100], ids=["sm_90", "sm_100"])
def reports(request: pytest.FixtureRequest) -> dict[str, dict]:
    """The report of every op for one GPU generation, from one subprocess that does not interpret."""
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "aot_compile.py"), str(request.param)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {report["op"]: report for report in lines}


@pytest.mark.parametrize("op", aot_compile.op_names())
def test_every_kernel_compiles_without_spills(reports, op):
    assert aot_compile.problems(reports[op]) == []


def test_the_wide_window_tile_uses_the_matrix_unit(reports):
    wide = [
        instance
        for instance in reports["tree_window_attention"]["instances"]
        if instance["constexprs"]["BLOCK_M"] == "64" and instance["signature"]["q_ptr"].startswith("*bf16")
    ]
    assert wide
    assert all(instance["mma"] for instance in wide)


def test_one_pass_attention_uses_the_warpgroup_matrix_unit(reports):
    instances = reports["tree_decode"]["instances"]
    wide = [instance for instance in instances if int(instance["constexprs"].get("BLOCK_M", 0)) >= 64]
    assert wide
    assert all({"HGMMA", "UTCHMMA"} & set(instance["mma"]) for instance in wide)


def test_an_op_without_specs_or_with_a_forgotten_kernel_is_a_problem(monkeypatch):
    name = "trtllm_tree.kernels.forgetful.triton"
    monkeypatch.setitem(sys.modules, name.rpartition(".")[0], types.ModuleType("forgetful"))
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    found = aot_compile.problems(aot_compile.compile_op("forgetful", 90))
    assert "aot_specs" in found[0]

    instance = {"kernel": "a_kernel", "constexprs": {}, "spill_bytes": 0, "usage": {"stack": 0, "local": 0}}
    report = {"op": "a", "kernels": ["a_kernel", "b_kernel"], "instances": [instance]}
    assert aot_compile.problems(report) == ["aot_specs() has no instance of b_kernel"]
    instance["usage"]["stack"] = 8
    report["kernels"] = ["a_kernel"]
    assert aot_compile.problems(report) == ["a_kernel {} spills 8 bytes a thread"]

    instance["spill_bytes"] = 8
    assert aot_compile.problems(report) == []
