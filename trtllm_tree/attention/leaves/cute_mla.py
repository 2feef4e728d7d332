"""The leaf `cute_mla`: the MLA prefix through the CuTe DSL decode of the package `tokenspeed_mla` on SM100 and SM103.

It gives the causal partial and, natively, a base-2 log-sum-exp (read in the kernels of 2.0.4). Under an FP8 cache its
output is bfloat16, whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.leaves.external_call import find, refusal
from trtllm_tree.attention.leaves.fp8 import query_for
from trtllm_tree.attention.leaves.paging import dense_table, nonempty_lens
from trtllm_tree.attention.leaves.rules import device_reasons, shape_reasons
from trtllm_tree.support.leaf_rules import TOKENSPEED_MLA, leaf_support
from trtllm_tree.support.report import Refused, TreeSupport

_ARGUMENTS = (
    "query",
    "kv_cache",
    "workspace_buffer",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "block_tables",
    "seq_lens",
    "max_seq_len",
    "softmax_scale",
    "causal_mask",
    "return_lse",
)
# The kernel splits keys only while its tiles of 128 query rows leave half of the SMs idle, so its float32 partials
# stay below (SMs / 2) x 128 rows x 513 values; this is enough for 250 SMs.
_WORKSPACE = 32 << 20


class CuteMlaLeaf(AttentionLeaf):
    """MLA over a latent cache."""

    name = "cute_mla"
    causal_prefix = True

    def __init__(self, device: torch.device, shape: LeafShape) -> None:
        self._device, self._shape = device, shape
        self._decode: Callable[..., Any] | None = None
        self._workspace: torch.Tensor | None = None

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
        """See `AttentionLeaf.prefix_decode`; `q` is the absorbed query, `k_cache` the latent cache."""
        assert v_cache is None, "MLA has no separate values"
        value_dim = self._shape.value_dim
        assert value_dim is not None, "a latent cache needs a value_dim"
        if self._decode is None:
            found = _find()
            assert not isinstance(found, Refused), f"{self.name} was refused: {found}"
            self._decode = found
        if self._workspace is None:
            self._workspace = torch.empty(_WORKSPACE, dtype=torch.int8, device=q.device)
        out, lse2 = self._decode(
            query=query_for(q, k_cache.dtype),
            kv_cache=k_cache,
            workspace_buffer=self._workspace,
            kv_lora_rank=value_dim,
            qk_rope_head_dim=q.shape[3] - value_dim,
            block_tables=dense_table(page_table),
            seq_lens=nonempty_lens(prefix_lens),
            max_seq_len=max(max_prefix_len, 1),
            softmax_scale=scale,
            causal_mask=True,
            return_lse=True,
        )
        return out.to(q.dtype), lse2

    def tree_support(self) -> TreeSupport:
        """Refused with every reason at once: GPU, shape, dtypes, the package."""
        reasons = device_reasons(self.name, self._device, self._shape)
        reasons += shape_reasons(self.name, self._shape)
        found = _find()
        return leaf_support([*reasons, found.reason] if isinstance(found, Refused) else reasons)


def _find() -> Callable[..., Any] | Refused:
    package, remedy = TOKENSPEED_MLA.name, TOKENSPEED_MLA.remedy
    decode = find(package, package, "tokenspeed_mla_decode", remedy)
    if isinstance(decode, Refused):
        return decode
    return refusal(package, decode, _ARGUMENTS, remedy) or decode
