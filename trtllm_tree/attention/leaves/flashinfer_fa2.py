"""The leaf `flashinfer_fa2`: the whole prefix for every row, through FlashInfer's FA2 paged prefill. The fallback.

Its kernels are planned on the host: `plan` reads the lengths, so it runs once per forward, before the layers and
outside of CUDA graphs. Must not know how FlashInfer's versions differ (`flashinfer_api`).
"""

from __future__ import annotations

from typing import Any

import torch

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.leaves import flashinfer_api
from trtllm_tree.attention.leaves.rules import device_reasons, shape_reasons
from trtllm_tree.support.leaf_rules import leaf_support
from trtllm_tree.support.report import Refused, TreeSupport

# What FlashInfer recommends; plans of split requests take their partials from it.
_WORKSPACE = 256 << 20


class FlashinferFa2Leaf(AttentionLeaf):
    """GQA on SM80 and newer. An FP8 cache meets the unquantised query."""

    name = "flashinfer_fa2"
    causal_prefix = False
    graph_safe = False

    def __init__(self, device: torch.device, shape: LeafShape) -> None:
        self._device, self._shape = device, shape
        self._wrapper: Any = None
        self._planned: tuple[int, int, float] | None = None

    def plan(
        self, page_table: torch.Tensor, prefix_lens: torch.Tensor, *, num_rows: int, scale: float
    ) -> None:
        """Read the lengths, and lay the work out for every layer that follows. Syncs with the device."""
        if self._wrapper is None:
            found = flashinfer_api.paged_prefill()
            assert not isinstance(found, Refused), f"{self.name} was refused: {found}"
            workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=page_table.device)
            self._wrapper = found.make(workspace)
        page_size, batch = self._shape.page_size, page_table.shape[0]
        lens = prefix_lens.cpu()
        num_pages = (lens + page_size - 1) // page_size
        column = torch.arange(page_table.shape[1])
        pages = page_table.cpu()[column < num_pages[:, None]].clamp(min=0)
        self._wrapper.plan(
            qo_indptr=torch.arange(batch + 1, dtype=torch.int32) * num_rows,
            paged_kv_indptr=_running_sum(num_pages),
            # An empty tensor has no address.
            paged_kv_indices=pages if len(pages) else torch.zeros(1, dtype=torch.int32),
            # A request without pages has no last one; FlashInfer adds this to its length.
            paged_kv_last_page_len=torch.where(lens > 0, (lens - 1) % page_size + 1, 0),
            num_qo_heads=self._shape.num_heads,
            num_kv_heads=self._shape.num_kv_heads,
            head_dim_qk=self._shape.head_dim,
            page_size=page_size,
            causal=False,
            sm_scale=scale,
            q_data_type=self._shape.dtype,
            kv_data_type=self._shape.kv_dtype,
            o_data_type=self._shape.dtype,
        )
        self._planned = (batch, num_rows, scale)

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
        """See `AttentionLeaf.prefix_decode`; `plan` must have seen this forward's tables and lengths."""
        assert v_cache is not None, "serves no latent cache"
        assert k_cache.stride() == v_cache.stride(), "K and V differ in strides"
        assert self._planned == (q.shape[0], q.shape[1], scale), f"planned for {self._planned}"
        out, lse2 = self._wrapper.run(
            q=q.reshape(-1, *q.shape[2:]), paged_kv_cache=(k_cache, v_cache), return_lse=True
        )
        return out.view(q.shape), lse2.view(q.shape[:3])

    def tree_support(self) -> TreeSupport:
        """Refused with every reason at once: GPU, shape, dtypes, FlashInfer."""
        reasons = device_reasons(self.name, self._device, self._shape)
        reasons += shape_reasons(self.name, self._shape)
        found = flashinfer_api.paged_prefill()
        return leaf_support([*reasons, found.reason] if isinstance(found, Refused) else reasons)


def _running_sum(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1], beginning with 0."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
