"""The `triton` leaf: prefix and masked window in one pass of our own kernel."""

from __future__ import annotations

import torch

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.leaves.rules import (
    FLOAT_DTYPES,
    capability_reasons,
    dtype_reasons,
    gqa_reasons,
    support,
)
from trtllm_tree.kernels.dispatch import use_triton
from trtllm_tree.kernels.tree_decode import tree_decode
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
        assert v_cache is not None, "serves no latent cache"
        return tree_decode(q, k_cache, v_cache, page_table, prefix_lens, mask, window=window, scale=scale)

    def tree_support(self) -> TreeSupport:
        """Verify and lanes are one kernel, so there is one answer for both."""
        reasons = self._device_reasons()
        if self._shape is not None:
            reasons += gqa_reasons(self._shape, head_dims=(64, 80, 96, 128, 256), page_sizes=(16, 32, 64))
            reasons += dtype_reasons(self._shape, FLOAT_DTYPES)
        return support(reasons)

    def _device_reasons(self) -> list[str]:
        if self._device.type == "cuda":
            return capability_reasons(self._device, needs="compute capability 8.0", at_least=(8, 0))
        if use_triton(torch.empty(0, device=self._device)):
            return []
        return [f"needs a CUDA device, and this is {self._device}; TLLM_TREE_KERNELS=triton interprets it"]
