"""The `reference` leaf: prefix attention in torch, on any device."""

from __future__ import annotations

import torch

from trtllm_tree.attention.base import AttentionLeaf
from trtllm_tree.kernels.prefix_attention import prefix_attention
from trtllm_tree.support.report import Supported, TreeSupport


class ReferenceLeaf(AttentionLeaf):
    """Torch over gathered pages. Slow on a GPU, and right.

    Args:
        causal_prefix: which partial to give; tests use both.
    """

    name = "reference"

    def __init__(self, *, causal_prefix: bool = False) -> None:
        self.causal_prefix = causal_prefix

    def prefix_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
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
        )

    def tree_support(self) -> TreeSupport:
        """Everything works."""
        return TreeSupport(verify=Supported(), lanes=Supported())
