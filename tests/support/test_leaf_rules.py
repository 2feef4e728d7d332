"""The table of leaf rules, its planning without torch, and that the leaves themselves are what it says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from trtllm_tree.attention.base import LeafShape
from trtllm_tree.attention.leaves.registry import LEAVES, make_leaf
from trtllm_tree.attention.leaves.rules import call_shape
from trtllm_tree.support.leaf_rules import (
    FP8,
    HOST_LEAVES,
    LEAF_RULES,
    CallShape,
    leaf_reasons,
    plan_host_leaf,
    plan_leaf,
)
from trtllm_tree.support.report import Refused, Supported

GQA = CallShape(
    num_heads=32, num_kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16", kv_dtype="bfloat16"
)
MLA = replace(GQA, num_heads=16, num_kv_heads=1, head_dim=576, value_dim=512)
SM80, SM90, SM100 = (8, 0), (9, 0), (10, 0)
TORCH = LeafShape(
    num_heads=32, num_kv_heads=8, head_dim=128, page_size=64, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
)


def test_every_leaf_has_rules_and_every_host_tries_leaves_that_exist() -> None:
    assert list(LEAF_RULES) == list(LEAVES)
    assert set(itertools.chain(*HOST_LEAVES.values())) <= set(LEAVES)


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_declares_what_its_rules_say(name: str) -> None:
    leaf, rules = make_leaf(name, torch.device("cpu"), TORCH), LEAF_RULES[name]
    assert leaf.supports_sliding_window == rules.sliding_window
    assert leaf.supports_sinks == rules.sinks
    assert leaf.graph_safe != rules.host_planned


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("capability", [SM80, SM90, SM100])
def test_a_leaf_on_a_gpu_answers_as_planned_but_for_missing_packages(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    missing = Refused("the package is missing")
    monkeypatch.setattr("trtllm_tree.attention.leaves.flashinfer_api.find", lambda *_: missing)
    monkeypatch.setattr("trtllm_tree.attention.leaves.cute_mla.find", lambda *_: missing)
    mla = replace(TORCH, num_heads=16, num_kv_heads=1, head_dim=576, value_dim=512)
    odd = replace(TORCH, head_dim=80, page_size=128, sliding_window=True, sinks=True)
    fp8 = replace(TORCH, dtype=torch.float32, kv_dtype=torch.float8_e4m3fn)
    for shape in (TORCH, mla, odd, replace(TORCH, dtype=torch.float32), fp8):
        if name == "reference" and shape is fp8:
            # It is told no device; the kernels beside it are.
            continue
        answer = make_leaf(name, torch.device("cuda"), shape).tree_support().verify
        found = [] if isinstance(answer, Supported) else answer.reason.split("; ")
        assert [reason for reason in found if reason != missing.reason] == leaf_reasons(
            name, call_shape(shape), capability
        )


@pytest.mark.parametrize(
    ("host", "shape", "capability", "leaf"),
    [
        ("embedded", GQA, SM90, "triton"),
        ("embedded", GQA, None, "reference"),
        ("embedded", GQA, (7, 5), "reference"),
        ("embedded", MLA, SM90, "triton"),
        ("embedded", replace(MLA, value_dim=576), SM90, "reference"),
        ("embedded", replace(GQA, sliding_window=True), SM90, "reference"),
        ("embedded", replace(GQA, sinks=True), SM90, "reference"),
        ("embedded", replace(GQA, head_dim=112), SM90, "reference"),
        ("embedded", replace(GQA, dtype="float32", kv_dtype=FP8), None, "reference"),
        ("tensorrt_llm", GQA, SM90, "triton"),
        ("tensorrt_llm", GQA, SM100, "trtllm_gen"),
        ("tensorrt_llm", replace(GQA, kv_dtype=FP8), SM100, "trtllm_gen"),
        ("tensorrt_llm", replace(GQA, head_dim=96), SM100, "triton"),
        ("tensorrt_llm", MLA, SM90, "triton"),
        ("tensorrt_llm", MLA, SM100, "trtllm_gen_mla"),
        ("tensorrt_llm", replace(MLA, page_size=16), SM100, "triton"),
    ],
)
def test_the_first_leaf_that_can_serve_is_planned(
    host: str, shape: CallShape, capability: tuple[int, int] | None, leaf: str
) -> None:
    planned = plan_host_leaf(host, shape, capability)
    assert (planned.name, planned.tree_support().lanes) == (leaf, Supported())
    assert planned.child_backends() == ()


def test_where_no_leaf_can_serve_each_says_why() -> None:
    names = ("trtllm_gen", "trtllm_gen_mla", "cute_mla", "triton", "flashinfer_fa2")
    planned = plan_leaf(names, MLA, (7, 5))
    answer = planned.tree_support()
    assert isinstance(answer.verify, Refused) and answer.verify == answer.lanes
    for name in names:
        assert f"{name}: " in answer.verify.reason and name in planned.name


@pytest.mark.parametrize("capability", [SM80, (8, 9), (12, 0)])
def test_tensorrt_llm_runs_trees_on_hopper_and_datacenter_blackwell_only(capability: tuple[int, int]) -> None:
    (reason,) = plan_host_leaf("tensorrt_llm", GQA, capability).reasons
    assert "9.0 or 10.0 or 10.3" in reason and f"{capability[0]}.{capability[1]}" in reason
    assert plan_host_leaf("embedded", GQA, capability).name == "triton"
    assert plan_host_leaf("tensorrt_llm", GQA, (10, 3)).name == "trtllm_gen"


@pytest.mark.parametrize(
    ("shape", "capability", "reason"),
    [
        (replace(GQA, kv_dtype=FP8), SM80, "needs compute capability 8.9"),
        (replace(GQA, dtype="float32", kv_dtype=FP8), SM90, "under a 16-bit dtype"),
    ],
)
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_an_fp8_cache_needs_a_gpu_and_a_dtype_that_our_kernels_read(
    name: str, shape: CallShape, capability: tuple[int, int], reason: str
) -> None:
    assert any(reason in found for found in leaf_reasons(name, shape, capability))
    assert leaf_reasons("reference", shape, None) == []
