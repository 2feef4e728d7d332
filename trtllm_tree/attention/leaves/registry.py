"""The leaves by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.leaves.cute_mla import CuteMlaLeaf
from trtllm_tree.attention.leaves.flashinfer_fa2 import FlashinferFa2Leaf
from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.attention.leaves.triton import TritonLeaf
from trtllm_tree.attention.leaves.trtllm_gen import TrtllmGenLeaf, TrtllmGenMlaLeaf
from trtllm_tree.errors import ConfigError, Problem

LEAVES: dict[str, Callable[[torch.device, LeafShape], AttentionLeaf]] = {
    "trtllm_gen": TrtllmGenLeaf,
    "trtllm_gen_mla": TrtllmGenMlaLeaf,
    "cute_mla": CuteMlaLeaf,
    "triton": TritonLeaf,
    "flashinfer_fa2": FlashinferFa2Leaf,
    "reference": lambda device, shape: ReferenceLeaf(shape=shape),
}


def make_leaf(name: str, device: torch.device, shape: LeafShape) -> AttentionLeaf:
    """The leaf of this name. Whether it can serve is its own answer, `tree_support`.

    Raises:
        ConfigError: no leaf has this name.
    """
    if name not in LEAVES:
        known = ", ".join(LEAVES)
        raise ConfigError(Problem("attention leaf", name, f"must be one of {known}", "Correct the name."))
    return LEAVES[name](device, shape)
