"""The KV cache managers: pools of real memory, their views, and the offsets that attention reads.

Layers of equal shape share a pool [blocks, layers, kv_factor, heads * rows * channels]. Both managers have the same
memory; their views differ, as in TensorRT-LLM.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

from .bindings import torch_dtype_to_binding
from .kv_blocks import BlockLedger
from .layout import device
from .requests import LlmRequest, get_draft_token_length
from .resources import BaseResourceManager

# Of blocks that a request does not own.
BAD_PAGE_INDEX = -1
FP8 = torch.float8_e4m3fn


class Role(str, Enum):
    KEY = "key"
    VALUE = "value"


class KVCacheManager(BaseResourceManager):
    """The V1 manager, single beam, no reuse, no windows.

    Args:
        num_kv_heads: of each layer; one number for all of them.
        kv_factor: 2, or 1 for latent rows (then one head of `head_dim` channels).
        layer_head_dims: where layers differ.
        stale_offsets: offsets behind a request's blocks name blocks of others, as they may in the real tables.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int | list[int],
        head_dim: int,
        tokens_per_block: int,
        max_seq_len: int,
        max_batch_size: int,
        dtype: torch.dtype,
        num_blocks: int | None = None,
        kv_factor: int = 2,
        layer_head_dims: list[int] | None = None,
        layer_ids: list[int] | None = None,
        spec_config: Any = None,
        is_draft: bool = False,
        stale_offsets: bool = False,
    ) -> None:
        heads = [num_kv_heads] * num_layers if isinstance(num_kv_heads, int) else list(num_kv_heads)
        self.num_layers = self.num_local_layers = num_layers
        self.num_kv_heads_per_layer, self.head_dim_per_layer = (
            heads,
            layer_head_dims or [head_dim] * num_layers,
        )
        self.num_kv_heads, self.head_dim, self.kv_factor = heads[0], head_dim, kv_factor
        self.tokens_per_block, self.max_seq_len, self.max_batch_size = (
            tokens_per_block,
            max_seq_len,
            max_batch_size,
        )
        # What TensorRT-LLM keeps is its own kind of dtype.
        self.dtype, self.torch_dtype = torch_dtype_to_binding(dtype), dtype
        self.is_draft, self.is_vswa, self.max_beam_width, self.kv_connector_manager = is_draft, False, 1, None
        self.pp_layers = layer_ids or list(range(num_layers))
        self.layer_offsets = {layer: local for local, layer in enumerate(self.pp_layers)}
        self.max_attention_window_vec = [max_seq_len] * num_layers
        self.stale_offsets = stale_offsets
        self._reserve_for(spec_config)
        row_limit = max_seq_len + self.num_extra_kv_tokens + self._kv_reserve_draft_tokens + 1
        self.max_blocks_per_seq = -(-row_limit // tokens_per_block)
        if num_blocks is None:
            num_blocks = self.max_blocks_per_seq * (max_batch_size + 1)
        self.blocks_in_primary_pool = num_blocks
        self.ledger = BlockLedger(num_blocks, tokens_per_block)
        self._make_pools(num_blocks)
        shape = (self.num_pools, max_batch_size + 1, 2, self.max_blocks_per_seq)
        self.host_kv_cache_block_offsets = torch.full(shape, BAD_PAGE_INDEX, dtype=torch.int32)
        self.impl = SimpleNamespace(
            get_primary_pool_data=self._pool_data, get_page_index_upper_bound=self._page_upper_bound
        )

    def _reserve_for(self, spec_config: Any) -> None:
        one_model = spec_config is not None and spec_config.spec_dec_mode.use_one_engine()
        self.num_extra_kv_tokens = spec_config.max_draft_len - 1 if one_model else 0
        self.max_draft_len = spec_config.max_draft_len if spec_config is not None else 0
        self.max_total_draft_tokens = spec_config.tokens_per_gen_step - 1 if spec_config is not None else 0
        self._kv_reserve_draft_tokens = self.max_total_draft_tokens
        if self.is_draft and getattr(spec_config, "use_dynamic_tree", False):
            lanes = spec_config.dynamic_tree_max_topK * spec_config.max_draft_len
            self._kv_reserve_draft_tokens = max(self.max_total_draft_tokens, lanes)

    def _make_pools(self, num_blocks: int) -> None:
        shapes = list(zip(self.num_kv_heads_per_layer, self.head_dim_per_layer, strict=True))
        kinds = list(dict.fromkeys(shapes))
        members = [[local for local, shape in enumerate(shapes) if shape == kind] for kind in kinds]
        mapping = [
            (kinds.index(shape), members[kinds.index(shape)].index(i)) for i, shape in enumerate(shapes)
        ]
        self.layers_in_pool = [len(layers) for layers in members]
        self.pools = [
            torch.empty(
                num_blocks, len(layers), self.kv_factor, heads * self.tokens_per_block * dim,
                dtype=self.torch_dtype, device=device(),
            )
            for layers, (heads, dim) in zip(members, kinds, strict=True)
        ]  # fmt: skip
        self.num_pools = len(self.pools)
        self._fill(list(range(num_blocks)), float("nan"))
        self.kv_cache_pool_mapping = torch.tensor(mapping, dtype=torch.int32)
        pointers = [[pool.data_ptr(), 0] for pool in self.pools]
        self.kv_cache_pool_pointers = torch.tensor(pointers, dtype=torch.int64)

    def _fill(self, blocks: list[int], value: float) -> None:
        """Unwritten memory is poison, except where TensorRT-LLM's own warm-up has run over it."""
        if not blocks:
            return
        index = torch.tensor(blocks, device=device())
        for pool in self.pools:
            poison = torch.full(pool[: len(blocks)].shape, value, device=device()).to(pool.dtype)
            if pool.dtype == FP8:
                pool.view(torch.uint8)[index] = poison.view(torch.uint8)
            else:
                pool[index] = poison

    def _pool_data(self, local: int) -> torch.Tensor:
        """One layer's slice of its pool, [blocks, kv_factor, row data]."""
        pool, inside = self.kv_cache_pool_mapping[local].tolist()
        return self.pools[pool][:, inside]

    def _page_upper_bound(self, local: int, role: Any) -> int:
        """Pages behind a layer's first one, in steps of one page, to the pool's end."""
        pool, inside = self.kv_cache_pool_mapping[local].tolist()
        return (self.blocks_in_primary_pool * self.layers_in_pool[pool] - inside) * self.kv_factor

    def get_buffers(self, layer_idx: int, kv_layout: str = "NHD") -> torch.Tensor:
        """A view of the layer's pages, [blocks, kv_factor, ...] in strides over all layers of the pool."""
        local = self.layer_offsets[layer_idx]
        data = self._pool_data(local)
        return data.view(data.shape[0], self.kv_factor, *self._page_shape(local, kv_layout))

    def _page_shape(self, local: int, kv_layout: str) -> tuple[int, int, int]:
        assert kv_layout in ("NHD", "HND"), kv_layout
        heads, rows = self.num_kv_heads_per_layer[local], self.tokens_per_block
        return (*((rows, heads) if kv_layout == "NHD" else (heads, rows)), self.head_dim_per_layer[local])

    def copy_batch_block_offsets(
        self, dst_tensor: torch.Tensor, request_ids: list[int], beam_width: int, num_contexts: int, num_seqs: int,
        max_blocks: int | None = None,
    ) -> None:  # fmt: skip
        """Write the offsets of these requests' blocks, in batch order, K and V."""
        host = self.host_kv_cache_block_offsets
        for row, request_id in enumerate(request_ids):
            blocks = torch.tensor(self.ledger.blocks[request_id], dtype=torch.int32)
            assert len(blocks) <= host.shape[-1], "more blocks than a request may have"
            host[:, row] = self._behind(request_id)
            for pool, layers in enumerate(self.layers_in_pool):
                for field in range(2):
                    offset = min(field, self.kv_factor - 1)
                    host[pool, row, field, : len(blocks)] = blocks * layers * self.kv_factor + offset
        dst_tensor[:, :num_seqs].copy_(host[:, :num_seqs])

    def _behind(self, request_id: int) -> torch.Tensor:
        """What stands behind a request's blocks, [pools, 1, 1]: nothing, or what the last user of the row left."""
        if not self.stale_offsets:
            return torch.full((self.num_pools, 1, 1), BAD_PAGE_INDEX, dtype=torch.int32)
        others = [blocks[0] for other, blocks in self.ledger.blocks.items() if other != request_id]
        layers = torch.tensor(self.layers_in_pool, dtype=torch.int32)
        # The worst that it can be: memory that is another request's now.
        return (others[-1] if others else 0) * layers[:, None, None] * self.kv_factor

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Reserve what the step may write."""
        for request in scheduled_batch.context_requests:
            if not request.is_first_context_chunk:
                continue
            rows = request.py_prompt_len + self.num_extra_kv_tokens + get_draft_token_length(request)
            self._reserve(request, rows)
        for request in scheduled_batch.generation_requests:
            if not request.is_cuda_graph_dummy:
                reserved = get_draft_token_length(request)
                self._reserve(request, 1 + (max(reserved, self._kv_reserve_draft_tokens) if reserved else 0))

    def _reserve(self, request: LlmRequest, rows: int) -> None:
        self._fill(self.ledger.grow(request.py_request_id, rows), float("nan"))

    def update_resources(self, scheduled_batch: Any) -> None:
        """Give back what the step did not keep. Rows are moved by nobody here."""
        for request in scheduled_batch.generation_requests:
            assert not request.py_num_accepted_draft_tokens_indices, "the double's manager does not relocate"
            if request.is_cuda_graph_dummy or request.py_request_id not in self.ledger.rows:
                continue
            unused = self._kv_reserve_draft_tokens - self.max_total_draft_tokens
            if request.py_rewind_len + unused > 0:
                self.rewind_kv_cache(request, request.py_rewind_len + unused)

    def rewind_kv_cache(self, request: LlmRequest, rewind_len: int) -> None:
        self.ledger.rewind(request.py_request_id, rewind_len)

    def free_resources(self, request: LlmRequest) -> None:
        self.ledger.release(request.py_request_id)

    def add_dummy_requests(self, request_ids: list[int], num_rows: int) -> None:
        """Blocks for requests that only pad a batch; what they read is finite."""
        for request_id in request_ids:
            self._fill(self.ledger.grow(request_id, num_rows), 0.0)

    def get_num_free_blocks(self) -> int:
        return len(self.ledger.free)

    def get_max_resource_count(self) -> int:
        return self.blocks_in_primary_pool

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        return 0


class KVCacheManagerV2(KVCacheManager):
    """The V2 manager: the same memory, and views that count pages instead of blocks."""

    def get_buffers(self, layer_idx: int, kv_layout: str = "NHD") -> torch.Tensor:
        """Contiguous pairs of pages from the layer's first one on: block b is pair b * (layers of the pool)."""
        local = self.layer_offsets[layer_idx]
        pool, inside = self.kv_cache_pool_mapping[local].tolist()
        page_shape = self._page_shape(local, kv_layout)
        pairs = self.pools[pool].flatten(0, 1)[inside:]
        assert pairs.shape[0] == self._page_upper_bound(local, Role.KEY) // self.kv_factor
        return pairs.view(-1, self.kv_factor, *page_shape)
