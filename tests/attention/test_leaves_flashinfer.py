"""Leaves that rest on other packages: their exact calls bind, and the cascade over what they return is attention.

The libraries' kernels need GPUs that most machines lack. Here their real signatures are bound, and stand-ins
(`library_fakes`) return what they are documented to return. `test_leaves_on_gpus` runs the real kernels.
"""

from __future__ import annotations

import inspect
import math
import random
from unittest import mock

import pytest
import torch

from tests.attention import library_fakes as fakes
from tests.attention.leaf_cases import BF16, FP8, LatentCase, as_fp8, check, shape_of, truth
from tests.attention.test_tree_attention_cascade import SCALE, Case, lane_rows, verify_rows
from tests.test_light_import import run_python
from trtllm_tree.attention.cascade import TreeCascade
from trtllm_tree.attention.leaves import flashinfer_api
from trtllm_tree.attention.leaves.cute_mla import CuteMlaLeaf
from trtllm_tree.attention.leaves.flashinfer_fa2 import FlashinferFa2Leaf
from trtllm_tree.attention.leaves.fp8 import query_for
from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.attention.leaves.trtllm_gen import TrtllmGenLeaf, TrtllmGenMlaLeaf
from trtllm_tree.support.report import Refused

VERIFY = [(1, [0, 1, 33]), (7, [0, 1, 6, 7, 16, 37]), (17, [0, 16, 17, 32, 60])]


# The exact calls against the installed packages.


@pytest.fixture
def real_flashinfer(monkeypatch: pytest.MonkeyPatch) -> dict[str, mock.Mock]:
    """The installed FlashInfer's own signatures, checked at every call, over the stand-ins' results."""
    decode, mla = pytest.importorskip("flashinfer.decode"), pytest.importorskip("flashinfer.mla")
    specs = {}
    for module, name, run in (
        (decode, fakes.GQA, fakes.trtllm_decode),
        (mla, fakes.MLA, fakes.trtllm_decode_mla),
    ):
        specs[name] = mock.create_autospec(getattr(module, name), side_effect=run)
        monkeypatch.setattr(module, name, specs[name])
    return specs


def test_the_gqa_call_binds_to_the_installed_flashinfer(real_flashinfer):
    case = Case("cpu", [0, 5, 20], verify_rows(4, 3), 4, dtype=BF16)
    check(TrtllmGenLeaf(torch.device("cpu"), shape_of(case)), case, case.truth, SCALE)
    given = real_flashinfer[fakes.GQA].call_args.kwargs
    wanted = {
        "backend": "trtllm-gen",
        "kv_layout": "HND",
        "uses_shared_paged_kv_idx": False,
        "return_lse": True,
    }
    assert wanted.items() <= given.items()
    assert given["q_len_per_req"] == 4
    assert given["seq_lens"].tolist() == [1, 5, 20]
    assert given["multi_ctas_kv_counter_buffer"].data_ptr() != given["workspace_buffer"].data_ptr()


def test_the_mla_call_binds_to_the_installed_flashinfer(real_flashinfer):
    case = LatentCase("cpu", [0, 5, 20], verify_rows(4, 3), 4)
    check(TrtllmGenMlaLeaf(torch.device("cpu"), shape_of(case)), case, case.truth, case.scale)
    given = real_flashinfer[fakes.MLA].call_args.kwargs
    assert {"backend": "trtllm-gen", "return_lse": True, "kv_lora_rank": 256}.items() <= given.items()


def test_the_fa2_calls_bind_to_the_installed_flashinfer(monkeypatch):
    prefill = pytest.importorskip("flashinfer.prefill")
    real = prefill.BatchPrefillWithPagedKVCacheWrapper
    assert isinstance(flashinfer_api.paged_prefill(), flashinfer_api.PagedPrefill)

    class Checked(fakes.Fa2Wrapper):
        def __init__(self, **given):
            inspect.signature(real).bind(**given)
            super().__init__(**given)

        def plan(self, **given):
            inspect.signature(real.plan).bind(self, **given)
            super().plan(**given)

        def run(self, **given):
            inspect.signature(real.run).bind(self, **given)
            return super().run(**given)

    for name in ("__init__", "plan", "run"):
        getattr(Checked, name).__signature__ = inspect.signature(getattr(real, name))
    monkeypatch.setattr(prefill, real.__name__, Checked)
    case = Case("cpu", [0, 5, 20], verify_rows(4, 3), 4, dtype=BF16)
    check(FlashinferFa2Leaf(torch.device("cpu"), shape_of(case)), case, case.truth, SCALE)


@pytest.fixture
def cute(monkeypatch: pytest.MonkeyPatch) -> None:
    """tokenspeed_mla with the installed package's parameters over the stand-in's results."""
    signature = fakes.tokenspeed_signature()

    def decode(**given):
        signature.bind(**given)
        return fakes.tokenspeed_mla_decode(**given)

    decode.__signature__ = signature
    fakes.install(monkeypatch, "tokenspeed_mla", __version__="fake", tokenspeed_mla_decode=decode)


# Versions.


@pytest.mark.parametrize("find", [flashinfer_api.trtllm_decode, flashinfer_api.trtllm_decode_mla])
def test_a_flashinfer_without_log_sum_exp_is_refused_by_version_and_argument(monkeypatch, find):
    fakes.install_flashinfer(monkeypatch, "0.6.0")
    found = find()
    assert isinstance(found, Refused)
    for word in ("0.6.0", "lse", "return_lse", ">= 0.6.12"):
        assert word in found.reason


@pytest.mark.parametrize("version", ["0.6.12", "0.6.15", "0.7.4"])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_each_later_flashinfer_gives_the_same_attention(monkeypatch, version, kv_dtype):
    fakes.install_flashinfer(monkeypatch, version)
    prefix_lens, visible = [0, 1, 6, 40], verify_rows(7, 4)
    case = Case("cpu", prefix_lens, visible, 7, dtype=BF16, heads=(6, 2))
    if kv_dtype == FP8:
        case = as_fp8(case)
    expected = truth(case, prefix_lens, visible, case.v_cache, SCALE)
    check(TrtllmGenLeaf(torch.device("cpu"), shape_of(case)), case, expected, SCALE)
    latent = LatentCase("cpu", prefix_lens, visible, 7, kv_dtype=kv_dtype)
    check(TrtllmGenMlaLeaf(torch.device("cpu"), shape_of(latent)), latent, latent.truth, latent.scale)


def test_mla_asks_for_base_two_where_it_can_choose(monkeypatch):
    fakes.install_flashinfer(monkeypatch, "0.7.4")
    newest = flashinfer_api.trtllm_decode_mla()
    fakes.install_flashinfer(monkeypatch, "0.6.15")
    older = flashinfer_api.trtllm_decode_mla()
    assert newest.constants["return_lse_base"] == "base2"
    assert "return_lse_base" not in older.constants
    assert older.constants["backend"] == "trtllm-gen", "which is base 2"


def test_a_new_required_argument_is_refused(monkeypatch):
    def changed(must_have, **others):
        raise AssertionError("never called")

    kinds = inspect.Parameter.KEYWORD_ONLY
    names = fakes.VERSIONS["0.6.12"][fakes.GQA]
    required = inspect.Parameter("must_have", kinds)
    optional = [inspect.Parameter(name, kinds, default=None) for name in names]
    changed.__signature__ = inspect.Signature([required, *optional])
    fakes.install(monkeypatch, "flashinfer", __version__="9.9")
    fakes.install(monkeypatch, "flashinfer.decode", **{fakes.GQA: changed})
    found = flashinfer_api.trtllm_decode()
    assert isinstance(found, Refused)
    assert "must_have" in found.reason
    assert "9.9" in found.reason


# The cascade over what the leaves are documented to return.


@pytest.mark.parametrize(("num_nodes", "prefix_lens"), VERIFY)
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_verify_through_trtllm_gen(real_flashinfer, num_nodes, prefix_lens, kv_dtype):
    visible = verify_rows(num_nodes, len(prefix_lens))
    case = Case("cpu", prefix_lens, visible, num_nodes, dtype=BF16)
    if kv_dtype == FP8:
        case = as_fp8(case)
    expected = truth(case, prefix_lens, visible, case.v_cache, SCALE)
    check(TrtllmGenLeaf(torch.device("cpu"), shape_of(case)), case, expected, SCALE)


@pytest.mark.parametrize(("topk", "num_steps"), [(2, 2), (4, 4)])
def test_lanes_through_trtllm_gen(real_flashinfer, topk, num_steps):
    prefix_lens = [0, 1, topk - 1, topk, 35]
    visible = [lane_rows(random.Random(topk), topk, num_steps - 1) for _ in prefix_lens]
    case = Case("cpu", prefix_lens, visible, (num_steps - 1) * topk, dtype=BF16)
    check(TrtllmGenLeaf(torch.device("cpu"), shape_of(case)), case, case.truth, SCALE)


@pytest.mark.parametrize("leaf", [TrtllmGenMlaLeaf, CuteMlaLeaf, ReferenceLeaf])
@pytest.mark.parametrize(("num_nodes", "prefix_lens"), VERIFY)
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_mla_verify(real_flashinfer, cute, leaf, num_nodes, prefix_lens, kv_dtype):
    visible = verify_rows(num_nodes, len(prefix_lens))
    case = LatentCase("cpu", prefix_lens, visible, num_nodes, kv_dtype=kv_dtype)
    if leaf is not ReferenceLeaf:
        check(leaf(torch.device("cpu"), shape_of(case)), case, case.truth, case.scale)
    elif kv_dtype == BF16:
        for causal in (True, False):
            check(ReferenceLeaf(causal_prefix=causal, shape=shape_of(case)), case, case.truth, case.scale)


@pytest.mark.parametrize(("num_nodes", "prefix_lens"), [*VERIFY, (4, [0, 0])])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_verify_through_fa2(monkeypatch, num_nodes, prefix_lens, kv_dtype):
    fakes.install(monkeypatch, "flashinfer", __version__="fake")
    fakes.install(monkeypatch, "flashinfer.prefill", BatchPrefillWithPagedKVCacheWrapper=fakes.Fa2Wrapper)
    visible = verify_rows(num_nodes, len(prefix_lens))
    case = Case("cpu", prefix_lens, visible, num_nodes, dtype=BF16)
    if kv_dtype == FP8:
        case = as_fp8(case)
    expected = truth(case, prefix_lens, visible, case.v_cache, SCALE, causal=False)
    monkeypatch.setattr(
        flashinfer_api, "paged_prefill", lambda: flashinfer_api.PagedPrefill(fakes.Fa2Wrapper)
    )
    check(FlashinferFa2Leaf(torch.device("cpu"), shape_of(case)), case, expected, SCALE)


def test_fa2_refuses_a_forward_that_was_not_planned(monkeypatch):
    monkeypatch.setattr(
        flashinfer_api, "paged_prefill", lambda: flashinfer_api.PagedPrefill(fakes.Fa2Wrapper)
    )
    case = Case("cpu", [5, 20], verify_rows(4, 2), 4, dtype=BF16)
    leaf = FlashinferFa2Leaf(torch.device("cpu"), shape_of(case))
    assert not leaf.graph_safe
    with pytest.raises(AssertionError, match="planned for None"):
        case.attend(leaf)
    TreeCascade(leaf).plan(case.page_table, case.rows, 2 * SCALE)
    with pytest.raises(AssertionError, match="planned for"):
        case.attend(leaf)


def test_pages_that_are_not_allocated_reach_no_library(real_flashinfer):
    # A host's table is a slice of a wider one, with -1 where nothing is allocated.
    case = Case("cpu", [0, 20], verify_rows(4, 2), 4, dtype=BF16)
    wide = torch.full((2, case.page_table.shape[1] + 3), -1, dtype=torch.int32)
    wide[:, : case.page_table.shape[1]] = case.page_table
    case.page_table = wide[:, :-1]
    check(TrtllmGenLeaf(torch.device("cpu"), shape_of(case)), case, case.truth, SCALE)
    tables = real_flashinfer[fakes.GQA].call_args.kwargs["block_tables"]
    assert tables.shape == (2, 2, wide.shape[1] - 1)


def test_an_fp8_query_saturates():
    q = torch.tensor([[600.0, -1e9, 448.0, 0.3]]).t().contiguous().t()
    rounded = query_for(q.to(BF16), FP8).float()
    assert rounded[0, :3].tolist() == [448.0, -448.0, 448.0]
    assert math.isclose(rounded[0, 3].item(), 0.3, rel_tol=1 / 16)
    assert query_for(q, torch.float32).is_contiguous()


def test_importing_the_leaves_imports_no_library():
    code = "import sys, trtllm_tree.attention.leaves.registry as r; "
    assert (
        run_python("-c", code + "print({'flashinfer', 'tokenspeed_mla', 'tvm_ffi'} & set(sys.modules))")
        == "set()"
    )
