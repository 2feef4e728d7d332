"""Each leaf says by name what it cannot serve, every reason at once, and the registry knows them all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention import library_fakes as fakes
from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.leaves.registry import LEAVES, make_leaf
from trtllm_tree.errors import ConfigError
from trtllm_tree.support.report import Refused, Supported
from trtllm_tree.support.resolve import tree_blockers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GPU = torch.device("cuda")
GQA = LeafShape(num_heads=32, num_kv_heads=8, head_dim=128, page_size=64, dtype=BF16, kv_dtype=BF16)
MLA = replace(GQA, num_heads=16, num_kv_heads=1, head_dim=576, value_dim=512)
SHAPES = dict.fromkeys(LEAVES, GQA) | {"trtllm_gen_mla": MLA, "cute_mla": MLA}
CAPABILITY = dict.fromkeys(LEAVES, (9, 0)) | dict.fromkeys(
    ("trtllm_gen", "trtllm_gen_mla", "cute_mla"), (10, 0)
)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer and tokenspeed_mla that can do everything."""
    fakes.install_flashinfer(monkeypatch, "0.7.4")
    fakes.install(monkeypatch, "flashinfer.prefill", BatchPrefillWithPagedKVCacheWrapper=Prefill)
    fakes.install(monkeypatch, "tokenspeed_mla", tokenspeed_mla_decode=fakes.tokenspeed_mla_decode)


class Prefill:
    """A prefill wrapper with the parameters that are used."""

    def __init__(self, float_workspace_buffer, kv_layout, backend): ...

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        o_data_type,
    ): ...

    def run(self, q, paged_kv_cache, return_lse): ...


def leaf_on(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: LeafShape, found: tuple[int, int]
) -> AttentionLeaf:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    return make_leaf(name, GPU, shape)


def reason(leaf: AttentionLeaf) -> str:
    answer = leaf.tree_support()
    assert isinstance(answer.verify, Refused), f"{leaf.name} was not refused"
    assert answer.lanes == answer.verify
    return answer.verify.reason


@pytest.mark.parametrize("name", LEAVES)
def test_every_leaf_supports_what_it_is_for(monkeypatch, libraries, name):
    shape = SHAPES[name]
    for kv_dtype in (BF16, FP8):
        for page_size in (32, 64):
            fitting = replace(shape, kv_dtype=kv_dtype, page_size=page_size)
            leaf = leaf_on(monkeypatch, name, fitting, CAPABILITY[name])
            assert leaf.tree_support().verify == Supported()
            assert leaf.name == name


@pytest.mark.parametrize("name", ["trtllm_gen", "triton", "flashinfer_fa2", "reference"])
@pytest.mark.parametrize("ratio", [1, 3, 5, 7, 8, 16])
def test_every_head_ratio_is_supported(monkeypatch, libraries, name, ratio):
    for head_dim in (64, 128, 256):
        shape = replace(GQA, num_heads=2 * ratio, num_kv_heads=2, head_dim=head_dim)
        assert leaf_on(monkeypatch, name, shape, CAPABILITY[name]).tree_support().verify == Supported()


REFUSALS = [
    ("trtllm_gen", {"page_size": 128}, "page size 128: must be one of 16, 32, 64"),
    ("trtllm_gen", {"num_heads": 66, "num_kv_heads": 2}, "33 query heads a KV head: at most 32"),
    ("trtllm_gen", {"num_heads": 9}, "9 query heads are no multiple of 8"),
    ("trtllm_gen", {"head_dim": 80}, "head_dim 80: must be one of 64, 128, 256"),
    ("trtllm_gen", {"dtype": FP32, "kv_dtype": FP32}, "dtype float32: must be bfloat16 or float16"),
    ("trtllm_gen", {"kv_dtype": E5M2}, "KV cache dtype float8_e5m2 under bfloat16"),
    ("trtllm_gen", {"kv_dtype": torch.int8}, "KV cache dtype int8 under bfloat16"),
    ("trtllm_gen", {"value_dim": 64}, "serves no latent (MLA) cache"),
    ("trtllm_gen_mla", {"page_size": 16}, "page size 16: must be one of 32, 64"),
    ("trtllm_gen_mla", {"value_dim": 448}, "(448, 128): must be (512, 64) or (256, 64)"),
    ("trtllm_gen_mla", {"num_heads": 96}, "96 query heads: at most 64, or 128"),
    ("trtllm_gen_mla", {"num_heads": 192}, "192 query heads"),
    ("trtllm_gen_mla", {"dtype": FP16, "kv_dtype": FP16}, "dtype float16: must be bfloat16"),
    ("trtllm_gen_mla", {"value_dim": None}, "serves latent (MLA) caches only"),
    ("cute_mla", {"head_dim": 320, "value_dim": 256}, "(256, 64): must be (512, 64)"),
    ("cute_mla", {"num_heads": 129}, "129 query heads: at most 128"),
    ("cute_mla", {"page_size": 48}, "page size 48"),
    ("cute_mla", {"dtype": FP32, "kv_dtype": FP32}, "dtype float32"),
    ("cute_mla", {"num_kv_heads": 2}, "serves latent (MLA) caches only"),
    ("triton", {"head_dim": 112}, "head_dim 112: must be one of 64, 80, 96, 128, 256"),
    ("triton", {"page_size": 128}, "page size 128"),
    ("triton", {"kv_dtype": FP16}, "KV cache dtype float16 under bfloat16"),
    ("triton", {"dtype": torch.float64, "kv_dtype": torch.float64}, "dtype float64"),
    ("triton", {"num_heads": 12}, "12 query heads are no multiple of 8"),
    ("triton", {"value_dim": 576}, "kv_lora_rank 576: at most 512"),
    ("flashinfer_fa2", {"head_dim": 96}, "head_dim 96: must be one of 64, 128, 256"),
    ("flashinfer_fa2", {"dtype": FP32, "kv_dtype": FP32}, "dtype float32"),
    ("flashinfer_fa2", {"kv_dtype": E5M2}, "float8_e5m2"),
    ("flashinfer_fa2", {"value_dim": 64}, "serves no latent (MLA) cache"),
    ("reference", {"dtype": FP32, "kv_dtype": E5M2}, "KV cache dtype float8_e5m2 under float32"),
    ("reference", {"num_heads": 9}, "9 query heads are no multiple of 8"),
]


@pytest.mark.parametrize(("name", "change", "expected"), REFUSALS)
def test_a_shape_that_a_leaf_cannot_serve_is_refused_by_name(monkeypatch, libraries, name, change, expected):
    leaf = leaf_on(monkeypatch, name, replace(SHAPES[name], **change), CAPABILITY[name])
    found = reason(leaf)
    assert expected in found
    assert ";" not in found, "one thing is wrong, and one is named"


@pytest.mark.parametrize(
    ("name", "found", "needs"),
    [
        ("trtllm_gen", (9, 0), "needs SM100 or SM103"),
        ("trtllm_gen", (12, 0), "needs SM100 or SM103"),
        ("trtllm_gen_mla", (9, 0), "needs SM100 or SM103"),
        ("cute_mla", (9, 0), "needs SM100 or SM103"),
        ("triton", (7, 5), "needs compute capability 8.0"),
        ("flashinfer_fa2", (7, 5), "needs SM80 or newer"),
    ],
)
def test_a_gpu_that_a_leaf_cannot_use_is_refused_by_capability(monkeypatch, libraries, name, found, needs):
    text = reason(leaf_on(monkeypatch, name, SHAPES[name], found))
    assert needs in text
    assert f"compute capability {found[0]}.{found[1]}" in text


@pytest.mark.parametrize("name", ["trtllm_gen", "trtllm_gen_mla", "cute_mla", "flashinfer_fa2", "triton"])
def test_kernels_are_refused_on_a_cpu(libraries, name):
    assert "this is cpu" in reason(make_leaf(name, torch.device("cpu"), SHAPES[name]))


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("trtllm_gen", "flashinfer"),
        ("trtllm_gen_mla", "flashinfer"),
        ("flashinfer_fa2", "flashinfer"),
        ("cute_mla", "tokenspeed_mla"),
    ],
)
def test_a_package_that_is_missing_or_broken_is_refused_with_the_remedy(
    monkeypatch, libraries, name, package
):
    import importlib

    real = importlib.import_module
    failures = {
        "is not installed": ModuleNotFoundError("No module", name=package),
        "cannot be imported (No module named 'tvm_ffi')": ModuleNotFoundError(
            "No module named 'tvm_ffi'", name="tvm_ffi"
        ),
        "cannot be imported (libcuda.so.1)": OSError("libcuda.so.1"),
    }
    for words, error in failures.items():

        def broken(module, error=error):
            if module.startswith(package):
                raise error
            return real(module)

        monkeypatch.setattr(importlib, "import_module", broken)
        text = reason(leaf_on(monkeypatch, name, SHAPES[name], CAPABILITY[name]))
        assert f"{package} {words}" in text
        assert "install " in text


def test_a_function_that_is_gone_is_refused_with_the_version(monkeypatch, libraries):
    fakes.install(monkeypatch, "flashinfer", __version__="0.1.2")
    fakes.install(monkeypatch, "flashinfer.decode")
    text = reason(leaf_on(monkeypatch, "trtllm_gen", GQA, (10, 0)))
    assert "flashinfer 0.1.2 has no flashinfer.decode.trtllm_batch_decode_with_kv_cache" in text


def test_a_tokenspeed_mla_whose_kernels_cannot_load_is_refused(monkeypatch, libraries):
    # Without its CUDA packages it exports a function that takes anything, and raises.
    def unavailable(*args, **kwargs):
        raise ImportError("needs CuTe DSL")

    fakes.install(monkeypatch, "tokenspeed_mla", tokenspeed_mla_decode=unavailable)
    text = reason(leaf_on(monkeypatch, "cute_mla", MLA, (10, 0)))
    assert "does not take query" in text
    assert "nvidia-cutlass-dsl" in text


def test_all_that_is_wrong_is_said_at_once(monkeypatch):
    fakes.install_flashinfer(monkeypatch, "0.6.0")
    shape = replace(GQA, head_dim=80, page_size=128, kv_dtype=E5M2)
    leaf = leaf_on(monkeypatch, "trtllm_gen", shape, (9, 0))
    (problem,) = tree_blockers(leaf, make_leaf("reference", GPU, GQA))
    assert (problem.option, problem.value) == ("verify attention backend", "trtllm_gen")
    for word in ("SM100", "head_dim 80", "page size 128", "float8_e5m2", "return_lse"):
        assert word in problem.rule
    assert problem.rule.count(";") >= 4


def test_an_unknown_leaf_lists_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        make_leaf("xqa", GPU, GQA)
    for name in ("xqa", *LEAVES):
        assert name in str(caught.value)
