"""The `triton` leaf: prefix and masked window in one pass of our own kernel."""

from __future__ import annotations

import torch

from trtllm_tree.attention.base import AttentionLeaf
from trtllm_tree.kernels.dispatch import use_triton
from trtllm_tree.kernels.tree_decode import tree_decode
from trtllm_tree.support.report import Refused, Supported, TreeSupport

_MIN_CAPABILITY = (8, 0)


class TritonLeaf(AttentionLeaf):
    """Paged split-KV attention whose last keys are masked: no partial is handed on and nothing is merged.

    Args:
        device: where it is to run; the answer of `tree_support` depends on it.
    """

    name = "triton"
    one_pass = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def tree_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        mask: torch.Tensor,
        *,
        window: int,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionLeaf.tree_decode`."""
        return tree_decode(q, k_cache, v_cache, page_table, prefix_lens, mask, window=window, scale=scale)

    def tree_support(self) -> TreeSupport:
        """Verify and lanes are one kernel, so there is one answer for both."""
        answer = self._answer()
        return TreeSupport(verify=answer, lanes=answer)

    def _answer(self) -> Supported | Refused:
        if self._device.type != "cuda":
            if use_triton(torch.empty(0, device=self._device)):
                return Supported()
            return Refused(
                f"needs a CUDA device, and this is {self._device}; TLLM_TREE_KERNELS=triton interprets it"
            )
        capability = torch.cuda.get_device_capability(self._device)
        if capability < _MIN_CAPABILITY:
            return Refused(f"needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}")
        return Supported()
