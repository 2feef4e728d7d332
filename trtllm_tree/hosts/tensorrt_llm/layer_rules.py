"""What our attention asks of TensorRT-LLM's attention layers, and every layer that does not have it, by name.

Must not know how anything is attended, nor import TensorRT-LLM: a layer is what it carries.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from trtllm_tree.errors import Problem

CHAIN_REMEDY = "Use tree_topk=1 (a chain), or a model without it."
# TensorRT-LLM's PositionEmbeddingType of layers that rotate: whether neighbouring channels are a pair.
_STYLES = {"rope_gptj": True, "rope_gpt_neox": False, "long_rope": False, "yarn": False}
_NVFP4_OUTPUT = "TRTLLM_ENABLE_ATTENTION_NVFP4_OUTPUT"
# Where attention modules keep the backend of generation rows: grouped heads, and latent rows.
_BACKENDS = ("attn", "mqa")
_FULL = "tree rows see all of their keys"


def attention_layers(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """The attention modules of a model, its draft model's included, each with its backend."""
    for module in model.modules():
        for name in _BACKENDS:
            backend = getattr(module, name, None)
            if hasattr(backend, "rope_params") and hasattr(backend, "num_kv_heads"):
                yield module, backend


def rotary_style(attn: Any) -> bool | None:
    """Whether the layer's own rotation takes neighbouring channels as a pair; None where it does not rotate."""
    return _STYLES[_position_type(attn)] if attn.rope_params.dim > 0 else None


def layer_problems(module: Any, attn: Any, *, drafts: bool = False) -> list[Problem]:
    """Everything about one layer that no leaf can make up for.

    Args:
        drafts: whether it is the draft model's.
    """
    latent = attn.is_mla_enable
    found = [
        *_position_problems(attn),
        _asked("sliding_window", getattr(module, "sliding_window", None), _FULL),
        _asked("attention_chunk_size", attn.attention_chunk_size, _FULL),
        _asked("sparse attention", getattr(attn, "sparse_params", None) and "given", _FULL),
    ]
    if getattr(module, "sinks", None) is not None:
        found.append(Problem("attention sinks", "given", "no leaf of this host serves them", CHAIN_REMEDY))
    if latent and drafts:
        rule = "TensorRT-LLM stores a drafter's latent rows itself, also where no page is allocated to them"
        found.append(Problem("draft attention", "MLA", rule, "Use a head with grouped heads (Llama-style)."))
    if latent and attn.rope_append is False:
        rule = "latent queries without their rotary channels cannot be attended"
        found.append(Problem("rope_append", False, rule, CHAIN_REMEDY))
    if getattr(attn, "has_fp4_kv_cache", False):
        rule = "must be a 16-bit dtype or fp8"
        found.append(Problem("kv_cache_config.dtype", "nvfp4", rule, "Set it to fp8 or auto."))
    if scales := _other_scales(attn):
        rule = "must be 1: the cache is read unscaled"
        found.append(Problem("FP8 KV scales", scales, rule, "Set kv_cache_config.dtype: auto."))
    if not latent and getattr(attn, "has_nvfp4", False) and os.environ.get(_NVFP4_OUTPUT, "1") == "1":
        remedy = f'Set {_NVFP4_OUTPUT}: "0" in env_overrides.'
        found.append(Problem(_NVFP4_OUTPUT, "1", "tree attention cannot give NVFP4", remedy))
    return [problem for problem in found if problem is not None]


def _asked(option: str, value: Any, rule: str) -> Problem | None:
    return Problem(option, value, rule, CHAIN_REMEDY) if value else None


def _position_problems(attn: Any) -> list[Problem]:
    """Of latent attention, TensorRT-LLM's own op rotates, whatever the style."""
    position = _position_type(attn)
    if position.startswith("alibi") or position == "relative":
        rule = "adds to scores, which tree attention does not"
    elif attn.rope_params.dim > 0 and position not in _STYLES and not attn.is_mla_enable:
        rule = f"must be one of {', '.join(_STYLES)}"
    else:
        return []
    return [Problem("position embedding", position, rule, CHAIN_REMEDY)]


def _position_type(attn: Any) -> str:
    kind = attn.position_embedding_type
    return str(getattr(kind, "name", kind))


def _other_scales(attn: Any) -> str:
    """The layer's KV scales where they are not 1. Waits for the device; for start-up."""
    if not getattr(attn, "has_fp8_kv_cache", False):
        return ""
    scales = [getattr(attn, name, None) for name in ("kv_scale_orig_quant", "kv_scale_quant_orig")]
    values = [
        value for scale in scales if scale is not None and not scale.is_meta for value in scale.tolist()
    ]
    return ", ".join(str(value) for value in values if value != 1.0)
