"""Leaves that rest on other packages, through their real kernels: `sm100` on Blackwell, `gpu` on any that fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.attention.leaf_cases import BF16, FP8, LatentCase, as_fp8, check, shape_of, truth
from tests.attention.test_tree_attention_cascade import SCALE, Case, verify_rows
from trtllm_tree.attention.leaves.cute_mla import CuteMlaLeaf
from trtllm_tree.attention.leaves.flashinfer_fa2 import FlashinferFa2Leaf
from trtllm_tree.attention.leaves.trtllm_gen import TrtllmGenLeaf, TrtllmGenMlaLeaf


def real_case(
    make: Callable[..., Case | LatentCase], prefix_lens: list[int], num_nodes: int, **options: object
) -> tuple[Case | LatentCase, list[list[list[int]]]]:
    visible = verify_rows(num_nodes, len(prefix_lens))
    return make("cuda", prefix_lens, visible, num_nodes, page_size=64, **options), visible


@pytest.mark.sm100
@pytest.mark.parametrize("num_nodes", [4, 16, 64])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("poisoned", [False, True])
def test_trtllm_gen_on_blackwell(num_nodes, kv_dtype, poisoned):
    prefix_lens = [700, 1, num_nodes - 2, 130, 0]
    case, visible = real_case(Case, prefix_lens, num_nodes, heads=(16, 4), dtype=BF16, head_dim=128)
    clear_unseen(case, poisoned)
    if kv_dtype == FP8:
        case = as_fp8(case)
    expected = truth(case, prefix_lens, visible, case.v_cache, SCALE)
    check(TrtllmGenLeaf(torch.device("cuda"), shape_of(case)), case, expected, SCALE)


@pytest.mark.sm100
@pytest.mark.parametrize("leaf", [TrtllmGenMlaLeaf, CuteMlaLeaf])
@pytest.mark.parametrize("num_nodes", [4, 16, 64])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("poisoned", [False, True])
def test_mla_on_blackwell(leaf, num_nodes, kv_dtype, poisoned):
    prefix_lens = [700, 1, num_nodes - 2, 130, 0]
    options = {"dims": (512, 64), "heads": 16, "kv_dtype": kv_dtype}
    case, _ = real_case(LatentCase, prefix_lens, num_nodes, **options)
    clear_unseen(case, poisoned)
    check(leaf(torch.device("cuda"), shape_of(case)), case, case.truth, case.scale)


def clear_unseen(case: Case | LatentCase, poisoned: bool) -> None:
    """Zero what nobody sees, unless it is to stay NaN; whether a leaf's own kernel tolerates that is asked too."""
    if not poisoned:
        caches = [case.k_cache] if case.v_cache is None else [case.k_cache, case.v_cache]
        for cache in caches:
            cache.copy_(cache.float().nan_to_num(nan=0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("num_nodes", [4, 16, 64])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_fa2_on_a_gpu(num_nodes, kv_dtype):
    pytest.importorskip("flashinfer")
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs SM80")
    prefix_lens = [700, 1, num_nodes - 2, 130, 0]
    case, visible = real_case(Case, prefix_lens, num_nodes, heads=(16, 4), dtype=BF16, head_dim=128)
    if kv_dtype == FP8:
        case = as_fp8(case)
    expected = truth(case, prefix_lens, visible, case.v_cache, SCALE, causal=False)
    check(FlashinferFa2Leaf(torch.device("cuda"), shape_of(case)), case, expected, SCALE)
