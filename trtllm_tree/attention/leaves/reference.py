"""The `reference` leaf: prefix attention in torch, on any device."""

from __future__ import annotations

import torch

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.leaves.rules import shape_reasons
from trtllm_tree.kernels.prefix_attention import prefix_attention
from trtllm_tree.support.leaf_rules import leaf_support
from trtllm_tree.support.report import TreeSupport


class ReferenceLeaf(AttentionLeaf):
    """Torch over gathered pages. Slow on a GPU, and right; any head and page size.

    Args:
        causal_prefix: which partial to give; tests use both.
        shape: what it is to serve; None answers for every shape, and knows no latent cache.
    """

    name = "reference"
    supports_sliding_window = True
    supports_sinks = True

    def __init__(self, *, causal_prefix: bool = False, shape: LeafShape | None = None) -> None:
        self.causal_prefix = causal_prefix
        self._shape = shape

    def prefix_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        *,
        max_prefix_len: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionLeaf.prefix_decode`."""
        return prefix_attention(
            q,
            k_cache,
            v_cache,
            page_table,
            prefix_lens,
            causal=self.causal_prefix,
            max_kv_len=max_prefix_len,
            scale=scale,
            value_dim=self._shape.value_dim if self._shape else None,
        )

    def sliding_prefix_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        first_keys: torch.Tensor,
        *,
        max_prefix_len: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionLeaf.sliding_prefix_decode`."""
        return prefix_attention(
            q,
            k_cache,
            v_cache,
            page_table,
            prefix_lens,
            causal=False,
            max_kv_len=max_prefix_len,
            scale=scale,
            value_dim=self._shape.value_dim if self._shape else None,
            first_keys=first_keys,
        )

    def tree_support(self) -> TreeSupport:
        """Refuses only what attention cannot mean."""
        return leaf_support([] if self._shape is None else shape_reasons(self.name, self._shape))
