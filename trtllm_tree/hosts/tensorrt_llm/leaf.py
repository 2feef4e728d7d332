"""Which leaf attends on this GPU: chosen once for each kind of layer, and every reason named where none can.

Must not know TensorRT-LLM.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.leaves.registry import make_leaf
from trtllm_tree.errors import Problem, UnsupportedError
from trtllm_tree.support.leaf_rules import HOST_LEAVES
from trtllm_tree.support.report import Refused

_LOGGER = logging.getLogger(__name__)


@cache
def choose_leaf(device: torch.device, shape: LeafShape) -> AttentionLeaf:
    """The first leaf of this host that can serve `shape` and be captured; torch on a CPU. Logs the choice.

    Raises:
        UnsupportedError: none can, with what each of them lacks.
    """
    # Torch over gathered pages is what tests on a CPU attend with; on a GPU it would go unnoticed.
    names = (*HOST_LEAVES["tensorrt_llm"], *(("reference",) if device.type == "cpu" else ()))
    reasons = []
    for name in names:
        leaf = make_leaf(name, device, shape)
        answer = leaf.tree_support().verify
        if isinstance(answer, Refused):
            reasons.append(f"{name}: {answer.reason}")
        elif not leaf.graph_safe:
            reasons.append(f"{name}: reads lengths on the host, and decode steps are CUDA graphs")
        else:
            _LOGGER.info("tree attention on %s: leaf %s for %s", device, name, shape)
            return leaf
    option = f"attention of {shape.num_heads} query and {shape.num_kv_heads} KV heads"
    remedy = "Use tree_topk=1 (a chain), or a GPU and a model that one of them serves."
    raise UnsupportedError(Problem(option, shape.head_dim, "; ".join(reasons), remedy))
