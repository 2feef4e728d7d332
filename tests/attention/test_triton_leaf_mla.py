"""The one-pass leaf over a latent cache, through the cascade, against a float64 oracle row by row."""

from __future__ import annotations

import random

import pytest
import torch

from tests.attention.leaf_cases import LatentCase, check, shape_of
from tests.attention.test_tree_attention_cascade import lane_rows, verify_rows
from trtllm_tree.attention.leaves.triton import TritonLeaf
from trtllm_tree.support.report import Supported


@pytest.mark.parametrize(("num_nodes", "page_size"), [(1, 16), (7, 64), (17, 32)])
def test_the_one_pass_leaf_verifies_trees_of_latent_rows(device, monkeypatch, num_nodes, page_size):
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    prefix_lens = [0, 1, num_nodes, page_size - 1, 2 * page_size + 5]
    case = LatentCase(
        device,
        prefix_lens,
        verify_rows(num_nodes, len(prefix_lens)),
        num_nodes,
        dims=(64, 16),
        page_size=page_size,
    )
    leaf = TritonLeaf(torch.device(device), shape_of(case))
    assert leaf.tree_support().verify == Supported()
    check(leaf, case, case.truth, case.scale)


def test_the_one_pass_leaf_attends_lanes_of_latent_rows(device, monkeypatch):
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    prefix_lens, rng = [0, 4, 67], random.Random(4)
    visible = [lane_rows(rng, 4, 3) for _ in prefix_lens]
    case = LatentCase(device, prefix_lens, visible, 12, dims=(64, 16), heads=5)
    check(TritonLeaf(torch.device(device), shape_of(case)), case, case.truth, case.scale)
