"""The `reference` leaf: prefix attention in torch, on any device."""

from __future__ import annotations

import torch

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.leaves.rules import FLOAT_DTYPES, dtype_reasons, gqa_reasons, support
from trtllm_tree.kernels.prefix_attention import prefix_attention
from trtllm_tree.support.report import TreeSupport


class ReferenceLeaf(AttentionLeaf):
    """Torch over gathered pages. Slow on a GPU, and right; any head and page size.

    Args:
        causal_prefix: which partial to give; tests use both.
        shape: what it is to serve; None answers for every shape, and knows no latent cache.
    """

    name = "reference"

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
        value_dim = self._shape.value_dim if self._shape else None
        assert v_cache is not None or value_dim is not None, "a latent cache needs a value_dim"
        out, lse2 = prefix_attention(
            q,
            k_cache,
            # A latent row is key and value; its channels behind value_dim are dropped from the sum.
            k_cache if v_cache is None else v_cache,
            page_table,
            prefix_lens,
            causal=self.causal_prefix,
            max_kv_len=max_prefix_len,
            scale=scale,
        )
        return (out[..., :value_dim].contiguous() if v_cache is None else out), lse2

    def tree_support(self) -> TreeSupport:
        """Refuses only what attention cannot mean."""
        shape = self._shape
        if shape is None:
            return support([])
        reasons = [] if shape.value_dim is not None else gqa_reasons(shape)
        return support(reasons + dtype_reasons(shape, FLOAT_DTYPES))
