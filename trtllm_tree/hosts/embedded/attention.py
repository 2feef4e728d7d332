"""Who attends on the embedded host: a leaf for a cache, and the cascade over it as the engine's decode attention."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.cascade import TreeCascade
from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.attention.leaves.triton import TritonLeaf
from trtllm_tree.attention.rows import ChainRows, TreeAttention
from trtllm_tree.engine.chain_attention import TorchDecodeAttention
from trtllm_tree.engine.kv_cache import LayerSpec
from trtllm_tree.engine.layer_options import layer_options
from trtllm_tree.engine.ports import DecodeAttentionFactory
from trtllm_tree.hosts.embedded.config import ResolvedConfig
from trtllm_tree.support.report import Refused, Supported

_LOGGER = logging.getLogger(__name__)


class CascadeDecodeAttention:
    """`engine.ports.DecodeAttentionFactory` over a one-pass leaf: consecutive rows are a chain.

    Args:
        cascade: over a leaf that looks at no host-side length.
        device: where the masks live.
    """

    graph_safe = True

    def __init__(self, cascade: TreeCascade, device: torch.device) -> None:
        assert cascade.leaf.one_pass, "a leaf that needs host-side bounds cannot be captured"
        self._cascade, self._chains = cascade, ChainRows(device)

    def __call__(self, kv_lens: torch.Tensor, num_rows: int, max_kv_len: int) -> TreeAttention:
        """See `engine.ports.DecodeAttentionFactory`."""
        return TreeAttention(self._cascade, self._chains.behind(kv_lens - num_rows, num_rows, max_kv_len))


@dataclass(frozen=True)
class HostAttention:
    """Attention over one cache: of trees, and of the consecutive rows of chains."""

    cascade: TreeCascade
    decode: DecodeAttentionFactory


def host_attention(device: torch.device, shape: LeafShape | None) -> HostAttention:
    """Chains run on our kernel where the leaf has one, in torch elsewhere."""
    cascade = TreeCascade(default_leaf(device, shape))
    decode = CascadeDecodeAttention(cascade, device) if cascade.leaf.one_pass else TorchDecodeAttention()
    return HostAttention(cascade, decode)


def default_leaf(device: torch.device | str, shape: LeafShape | None = None) -> AttentionLeaf:
    """The attention leaf of a device: our kernel on a GPU that it runs on, torch elsewhere. Logs the choice.

    Without a `shape` the device alone decides.
    """
    device = torch.device(device)
    kernel_leaf = TritonLeaf(device, shape)
    answer = kernel_leaf.tree_support().verify
    runs = device.type == "cuda" and isinstance(answer, Supported)
    leaf = kernel_leaf if runs else ReferenceLeaf(shape=shape)
    cache = "grouped heads" if shape is None or shape.value_dim is None else "latent rows"
    why = f" (triton: {answer.reason})" if isinstance(answer, Refused) else ""
    _LOGGER.info("tree attention over %s on %s%s: leaf %s", cache, device, why, leaf.name)
    return leaf


def target_shape(resolved: ResolvedConfig, config: Any, layers: dict[str, LayerSpec]) -> LeafShape:
    """What the target's layers ask of a leaf, by its transformers config."""
    layer, options = next(iter(layers.values())), layer_options(config)
    return leaf_shape(
        resolved,
        config.num_attention_heads,
        layer,
        sliding_window=any(each.sliding_window is not None for each in options),
        sinks=any(each.sinks for each in options),
    )


def leaf_shape(
    resolved: ResolvedConfig,
    num_heads: int,
    layer: LayerSpec,
    *,
    sliding_window: bool = False,
    sinks: bool = False,
) -> LeafShape:
    """What layers of `num_heads` query heads over caches like `layer` ask of a leaf."""
    return LeafShape(
        num_heads=num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        page_size=resolved.page_size,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        value_dim=layer.value_dim,
        sliding_window=sliding_window,
        sinks=sinks,
        max_batch=resolved.max_batch_size,
        max_rows=resolved.window_len,
    )
