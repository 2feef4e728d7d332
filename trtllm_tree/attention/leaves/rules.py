"""A leaf's rules (`support.leaf_rules`) put to a torch device and shape. Must not know any leaf."""

from __future__ import annotations

import torch

from trtllm_tree.attention.base import LeafShape
from trtllm_tree.support.leaf_rules import LEAF_RULES, CallShape


def device_reasons(name: str, device: torch.device, shape: LeafShape | None = None) -> list[str]:
    """Why the leaf cannot run on this device, and why our kernels there cannot read the cache of `shape`."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    rules = LEAF_RULES[name]
    reasons = rules.device_reasons(capability, str(device))
    return reasons if shape is None else reasons + rules.fp8_reasons(call_shape(shape), capability)


def shape_reasons(name: str, shape: LeafShape) -> list[str]:
    """Why the leaf cannot serve layers of this shape."""
    return LEAF_RULES[name].shape_reasons(call_shape(shape))


def call_shape(shape: LeafShape) -> CallShape:
    """`shape` with its dtypes as names."""
    return CallShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        dtype=_name(shape.dtype),
        kv_dtype=_name(shape.kv_dtype),
        value_dim=shape.value_dim,
        sliding_window=shape.sliding_window,
        sinks=shape.sinks,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
