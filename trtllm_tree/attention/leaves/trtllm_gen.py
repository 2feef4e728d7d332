"""The leaves `trtllm_gen` and `trtllm_gen_mla`: the prefix through FlashInfer's trtllm-gen decode on SM100 and SM103.

Both give the causal partial: with seq_lens = P and R query rows, row r covers keys [0, P - R + 1 + r). Lengths P < R
are legal there (FlashInfer's reduction takes max(count, 0) per row); what rows without a key hold is undefined.

Known limit: the kernel reads whole pages. That a NaN in a slot behind the prefix on its last page stays out of the
result is not promised by FlashInfer, so a host must not hand out pools of uninitialised memory.

Must not know how FlashInfer's versions differ (`flashinfer_api`).
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.leaves import flashinfer_api
from trtllm_tree.attention.leaves.flashinfer_api import TrtllmDecode
from trtllm_tree.attention.leaves.fp8 import query_for
from trtllm_tree.attention.leaves.paging import dense_table, nonempty_lens
from trtllm_tree.attention.leaves.rules import device_reasons, shape_reasons
from trtllm_tree.support.leaf_rules import leaf_support
from trtllm_tree.support.report import Refused, TreeSupport

# Where they have no buffer of their own, the counters are these first bytes of the workspace.
_COUNTER_HEAD = 8 << 20
# Partial outputs of the CTAs that share a request: at most 160 SMs x 256 rows x (512 channels + 2) x 4 bytes.
_PARTIALS = 128 << 20
# FlashInfer's guard behind the softmax statistics.
_STATS_GUARD = 1 << 20
_MAX_SMS = 1024


class _Scratch:
    """The workspace, and the multi-CTA counters as a view or as a buffer of their own.

    Addresses never change. All layers share it, one after another on one stream.
    """

    def __init__(self, shape: LeafShape, device: torch.device, own_counters: bool) -> None:
        # [B, ceil(R / 256) * 256, Hq] pairs of float32.
        stats = 8 * shape.max_batch * -(-shape.max_rows // 256) * 256 * shape.num_heads
        size = _COUNTER_HEAD + stats + _STATS_GUARD + _PARTIALS
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        counter_bytes = 4 * max(shape.max_batch * shape.num_heads, _MAX_SMS)
        self.counters = (
            torch.zeros(-(-counter_bytes // 32) * 32, dtype=torch.uint8, device=device)
            if own_counters
            else self.workspace[:_COUNTER_HEAD]
        )

    def clear(self) -> None:
        """Zero the counters in place: a memset node in a graph.

        The kernels leave them zero, but one launch that was cut short would spoil every later one.
        """
        self.counters.zero_()


class _TrtllmGen(AttentionLeaf):
    causal_prefix = True

    def __init__(self, device: torch.device, shape: LeafShape) -> None:
        self._device, self._shape = device, shape
        self._decode: TrtllmDecode | None = None
        self._scratch: _Scratch | None = None

    @abstractmethod
    def _find(self) -> TrtllmDecode | Refused:
        """The library's function."""

    def tree_support(self) -> TreeSupport:
        """Refused with every reason at once: GPU, shape, dtypes, FlashInfer."""
        reasons = device_reasons(self.name, self._device, self._shape)
        reasons += shape_reasons(self.name, self._shape)
        found = self._find()
        return leaf_support([*reasons, found.reason] if isinstance(found, Refused) else reasons)

    def _ready(self, q: torch.Tensor) -> tuple[TrtllmDecode, _Scratch]:
        assert q.shape[0] <= self._shape.max_batch, f"batch {q.shape[0]} exceeds {self._shape.max_batch}"
        assert q.shape[1] <= self._shape.max_rows, f"{q.shape[1]} rows exceed {self._shape.max_rows}"
        if self._decode is None:
            found = self._find()
            assert not isinstance(found, Refused), f"{self.name} was refused: {found}"
            self._decode = found
        if self._scratch is None:
            self._scratch = _Scratch(self._shape, q.device, self._decode.own_counters)
        self._scratch.clear()
        return self._decode, self._scratch


class TrtllmGenLeaf(_TrtllmGen):
    """GQA. An FP8 cache is multiplied with the query rounded to FP8, as that decode always does."""

    name = "trtllm_gen"

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
        """See `AttentionLeaf.prefix_decode`. Keys and values must have the same strides."""
        assert v_cache is not None, "a latent cache is for trtllm_gen_mla"
        # The library describes both by the strides of the keys.
        assert k_cache.stride() == v_cache.stride(), "K and V differ in strides"
        decode, scratch = self._ready(q)
        batch, num_rows, num_heads, head_dim = q.shape
        out = torch.empty(batch * num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
        table = dense_table(page_table)
        out, lse2 = decode(
            query=query_for(q, k_cache.dtype).view(out.shape),
            kv_cache=(k_cache, v_cache),
            workspace_buffer=scratch.workspace,
            counters=scratch.counters,
            # A page holds the same tokens in both caches, which have addresses of their own.
            block_tables=torch.stack((table, table), dim=1),
            seq_lens=nonempty_lens(prefix_lens),
            max_seq_len=max(max_prefix_len, 1),
            bmm1_scale=scale,
            bmm2_scale=1.0,
            out=out,
            lse=torch.empty(out.shape[:2], dtype=torch.float32, device=q.device),
            q_len_per_req=num_rows,
        )
        return out.view(q.shape), lse2.view(q.shape[:3])

    def _find(self) -> TrtllmDecode | Refused:
        return flashinfer_api.trtllm_decode()


class TrtllmGenMlaLeaf(_TrtllmGen):
    """MLA. How the kernel groups rows and heads into CTAs changes with shapes and batch; that is speed only."""

    name = "trtllm_gen_mla"

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
        decode, scratch = self._ready(q)
        batch, num_rows, num_heads, head_dim = q.shape
        out, lse2 = decode(
            query=query_for(q, k_cache.dtype),
            kv_cache=k_cache,
            workspace_buffer=scratch.workspace,
            counters=scratch.counters,
            qk_nope_head_dim=_NOPE_DIM[value_dim],
            kv_lora_rank=value_dim,
            qk_rope_head_dim=head_dim - value_dim,
            block_tables=dense_table(page_table, multiple=max(128 // k_cache.shape[2], 1)),
            seq_lens=nonempty_lens(prefix_lens),
            max_seq_len=max(max_prefix_len, 1),
            bmm1_scale=scale,
            bmm2_scale=1.0,
            out=torch.empty(*q.shape[:3], value_dim, dtype=torch.bfloat16, device=q.device),
            lse=torch.empty(batch * num_rows, num_heads, dtype=torch.float32, device=q.device),
        )
        return out, lse2.view(q.shape[:3])

    def _find(self) -> TrtllmDecode | Refused:
        return flashinfer_api.trtllm_decode_mla()


# Query channels without position before absorption, which FlashInfer asks for beside kv_lora_rank.
_NOPE_DIM = {512: 128, 256: 64}
