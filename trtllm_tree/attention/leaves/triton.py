"""The `triton` leaf: prefix and masked window in one pass of our own kernel."""

from __future__ import annotations

import torch

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.leaves.rules import device_reasons, shape_reasons
from trtllm_tree.kernels.dispatch import use_triton
from trtllm_tree.kernels.tree_decode import tree_decode
from trtllm_tree.support.leaf_rules import leaf_support
from trtllm_tree.support.report import TreeSupport


class TritonLeaf(AttentionLeaf):
    """Paged split-KV attention whose last keys are masked: no partial is handed on and nothing is merged.

    Args:
        device: where it is to run; the answer of `tree_support` depends on it.
        shape: what it is to serve; None answers for the device alone.
    """

    name = "triton"
    one_pass = True

    def __init__(self, device: torch.device, shape: LeafShape | None = None) -> None:
        self._device, self._shape = device, shape

    def tree_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        mask: torch.Tensor,
        *,
        window: int,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionLeaf.tree_decode`."""
        value_dim = None if self._shape is None else self._shape.value_dim
        return tree_decode(
            q,
            k_cache,
            v_cache,
            page_table,
            prefix_lens,
            mask,
            window=window,
            scale=scale,
            value_dim=value_dim,
        )

    def tree_support(self) -> TreeSupport:
        """Verify and lanes are one kernel, so there is one answer for both."""
        reasons = self._device_reasons()
        if self._shape is not None:
            reasons += shape_reasons(self.name, self._shape)
        return leaf_support(reasons)

    def _device_reasons(self) -> list[str]:
        if self._device.type == "cuda":
            return device_reasons(self.name, self._device, self._shape)
        if use_triton(torch.empty(0, device=self._device)):
            return []
        (reason,) = device_reasons(self.name, self._device)
        return [f"{reason}; TLLM_TREE_KERNELS=triton interprets it"]
