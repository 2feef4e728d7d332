"""The metadata of one step's attention: lengths, block offsets, and what speculation adds to them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from .layout import NEW, device
from .mamba import Mamba2Metadata


@dataclass
class KVCacheParams:
    use_cache: bool
    num_cached_tokens_per_seq: list[int] = field(default_factory=list)
    num_extra_kv_tokens: int = 0


@dataclass(kw_only=True)
class AttentionMetadata:
    """Lengths on both sides. Setting `seq_lens` or `num_contexts` recounts, and copies to the device."""

    max_num_requests: int
    max_num_tokens: int
    max_num_sequences: int | None = None
    kv_cache_manager: Any = None
    draft_kv_cache_manager: Any = None
    mapping: Any = None
    is_cuda_graph: bool = False
    kv_cache_params: KVCacheParams | None = None
    request_ids: list[int] | None = None
    prompt_lens: list[int] | None = None
    runtime_features: Any = None
    all_rank_num_tokens: list[int] | None = None
    padded_num_tokens: int | None = None
    cache_indirection: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    num_chunked_ctx_requests: int = 0

    def __post_init__(self) -> None:
        self._num_contexts = self._num_generations = self._num_ctx_tokens = self._num_tokens = 0
        self._saved_tensors: dict[str, torch.Tensor] = {}
        self._seq_lens: torch.Tensor | None = None
        self._seq_lens_cuda: torch.Tensor | None = None
        self.max_num_sequences = self.max_num_sequences or self.max_num_requests

    def on_update(self):
        if self._seq_lens is None:
            return
        self._num_ctx_tokens = int(self._seq_lens[: self._num_contexts].sum())
        self._num_generations = self._seq_lens.shape[0] - self._num_contexts
        self._num_tokens = int(self._seq_lens.sum())

    @property
    def seq_lens(self) -> torch.Tensor:
        assert self._seq_lens is not None
        return self._seq_lens

    @seq_lens.setter
    def seq_lens(self, value: torch.Tensor) -> None:
        self._seq_lens = value
        self.on_update()
        if self.is_cuda_graph and self._seq_lens_cuda is not None:
            # Its address is in the graph.
            self._seq_lens_cuda.copy_(value)
        else:
            self._seq_lens_cuda = value.to(device())

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        assert self._seq_lens_cuda is not None
        return self._seq_lens_cuda

    @property
    def num_contexts(self) -> int:
        return self._num_contexts

    @num_contexts.setter
    def num_contexts(self, value: int) -> None:
        self._num_contexts = value
        self.on_update()

    @property
    def num_generations(self) -> int:
        return self._num_generations

    @property
    def num_ctx_tokens(self) -> int:
        return self._num_ctx_tokens

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def is_cross(self) -> bool:
        return False

    def prepare_for_spec_dec(self, *fields: str) -> None:
        """Put clones in the place of these tensors, until `restore_from_spec_dec`."""
        assert not self._saved_tensors, "prepare_for_spec_dec twice without a restore"
        for name in fields:
            self._saved_tensors[name] = getattr(self, name)
            setattr(self, name, getattr(self, name).clone())

    def restore_from_spec_dec(self) -> None:
        for name, tensor in self._saved_tensors.items():
            setattr(self, name, tensor)
        self._saved_tensors.clear()

    if NEW:

        @property
        def has_spec_dec_saved_state(self) -> bool:
            return bool(self._saved_tensors)

    def on_update_kv_lens(self) -> None:
        """Lengths were changed on the device."""

    def update_for_spec_dec(self) -> None:
        """Lengths were changed by the drafter."""


@dataclass(kw_only=True)
class TrtllmAttentionMetadata(AttentionMetadata):
    """The TRTLLM backend's: device lengths, block offsets, and the tree of the slots."""

    workspace: torch.Tensor | None = None
    cuda_graph_workspace: torch.Tensor | None = None
    beam_width: int = 1
    is_spec_decoding_enabled: bool = False
    use_spec_decoding: bool = False
    is_spec_dec_tree: bool = False
    is_spec_dec_dynamic_tree: bool = False
    max_total_draft_tokens: int | None = None
    spec_decoding_position_offsets: torch.Tensor | None = None
    spec_decoding_packed_mask: torch.Tensor | None = None
    spec_decoding_generation_lengths: torch.Tensor | None = None
    kv_cache_block_offsets: torch.Tensor | None = None
    host_kv_cache_block_offsets: torch.Tensor | None = None
    draft_kv_cache_block_offsets: torch.Tensor | None = None
    helix_position_offsets: torch.Tensor | None = None
    use_paged_context_fmha: bool = False
    mamba_metadata: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.max_num_sequences
        self.prompt_lens_cuda, self.kv_lens_cuda = (
            torch.zeros(rows, dtype=torch.int32, device=device()) for _ in range(2)
        )
        self.prompt_lens_cpu, self.kv_lens, self.host_request_types = (
            torch.zeros(rows, dtype=torch.int32) for _ in range(3)
        )
        self.host_total_kv_lens = torch.zeros(2, dtype=torch.int32)
        if self.workspace is None:
            self.workspace, self.cuda_graph_workspace = (
                torch.empty(0, dtype=torch.int8, device=device()) for _ in range(2)
            )
        self.kv_cache_block_offsets = self._offsets(self.kv_cache_manager)
        self.draft_kv_cache_block_offsets = self._offsets(self.draft_kv_cache_manager)
        if self.kv_cache_manager is not None:
            self.host_kv_cache_block_offsets = self.kv_cache_manager.host_kv_cache_block_offsets

    def _offsets(self, manager: Any) -> torch.Tensor | None:
        if manager is None:
            return None
        shape = (manager.num_pools, self.max_num_sequences, 2, manager.max_blocks_per_seq)
        return torch.full(shape, -1, dtype=torch.int32, device=device())

    @property
    def tokens_per_block(self):
        return None if self.kv_cache_manager is None else self.kv_cache_manager.tokens_per_block

    @property
    def host_kv_cache_pool_mapping(self):
        return None if self.kv_cache_manager is None else self.kv_cache_manager.kv_cache_pool_mapping

    @property
    def host_kv_cache_pool_pointers(self):
        return None if self.kv_cache_manager is None else self.kv_cache_manager.kv_cache_pool_pointers

    @property
    def effective_workspace(self):
        return self.cuda_graph_workspace if self.is_cuda_graph else self.workspace

    @property
    def max_seq_len(self) -> int:
        return self.kv_cache_manager.max_seq_len

    @property
    def spec_decoding_position_offsets_for_cpp(self) -> torch.Tensor | None:
        offsets = self.spec_decoding_position_offsets
        return None if offsets is None else offsets.view(self.max_num_requests, -1)

    def prepare(self) -> None:
        """Fill every buffer for the batch that was described on the host."""
        assert (
            self.kv_cache_params is not None and self.request_ids is not None and self.prompt_lens is not None
        )
        size, split = self.num_seqs, self.num_contexts
        self.prompt_lens_cpu[:size] = torch.tensor(self.prompt_lens, dtype=torch.int32)
        self.prompt_lens_cuda[:size].copy_(self.prompt_lens_cpu[:size])
        cached = torch.tensor(self.kv_cache_params.num_cached_tokens_per_seq, dtype=torch.int32)
        kv_lens = cached + self.seq_lens
        self.kv_lens[:size] = kv_lens + self.kv_cache_params.num_extra_kv_tokens
        self.kv_lens_cuda[:size].copy_(kv_lens)
        self.host_total_kv_lens[0], self.host_total_kv_lens[1] = kv_lens[:split].sum(), kv_lens[split:].sum()
        self.host_request_types[:split], self.host_request_types[split:size] = 0, 1
        for manager, offsets in (
            (self.kv_cache_manager, self.kv_cache_block_offsets),
            (self.draft_kv_cache_manager, self.draft_kv_cache_block_offsets),
        ):
            if manager is not None:
                manager.copy_batch_block_offsets(offsets, self.request_ids, self.beam_width, split, size)
        if hasattr(self.kv_cache_manager, "get_state_indices"):
            self.mamba_metadata = self.mamba_metadata or Mamba2Metadata(self.max_num_sequences)
            self.mamba_metadata.prepare(self)
        self.kv_lens_cuda_runtime, self.kv_lens_runtime = self.kv_lens_cuda[:size], kv_lens
        self.prompt_lens_cuda_runtime = self.prompt_lens_cuda[:size]
        self.prompt_lens_cpu_runtime = self.prompt_lens_cpu[:size]
        self.host_request_types_runtime = self.host_request_types[:size]

    def create_cuda_graph_metadata(
        self, max_batch_size: int, max_draft_tokens: int = 0
    ) -> TrtllmAttentionMetadata:
        """A copy with buffers of its own, whose addresses a graph may keep."""
        assert not self.is_cuda_graph
        graph = copy.copy(self)
        graph.is_cuda_graph, graph.max_num_sequences = True, max_batch_size
        graph.spec_decoding_position_offsets = graph.spec_decoding_packed_mask = None
        graph.spec_decoding_generation_lengths = graph.mamba_metadata = None
        graph.__post_init__()
        graph.seq_lens = torch.full((max_batch_size,), 1 + max_draft_tokens, dtype=torch.int32)
        graph.num_contexts = 0
        return graph

    def update_spec_dec_param(
        self, batch_size: int, is_spec_decoding_enabled: bool, is_spec_dec_tree: bool, is_spec_dec_dynamic_tree: bool,
        max_draft_len: int, max_total_draft_tokens: int, spec_metadata: Any = None, spec_tree_manager: Any = None,
        num_contexts: int = 0,
    ) -> None:  # fmt: skip
        """Called on the host before every step and replay: mode, and the generation slots' trees."""
        self.is_spec_decoding_enabled = self.use_spec_decoding = is_spec_decoding_enabled
        self.is_spec_dec_tree, self.is_spec_dec_dynamic_tree = is_spec_dec_tree, is_spec_dec_dynamic_tree
        self.max_total_draft_tokens = max_total_draft_tokens
        if not is_spec_decoding_enabled:
            return
        nodes, requests = max_total_draft_tokens + 1, self.max_num_requests
        if self.spec_decoding_generation_lengths is None:
            self.spec_decoding_generation_lengths = self._ints(requests)
            if is_spec_dec_dynamic_tree:
                width = spec_tree_manager._internal_buf_dim
                self.spec_decoding_position_offsets = self._ints(requests * width)
                self.spec_decoding_packed_mask = self._ints(requests, width, -(-width // 32))
        self.spec_decoding_generation_lengths[:batch_size] = nodes
        if not is_spec_dec_dynamic_tree:
            row = torch.arange(nodes, dtype=torch.int32, device=device())
            self.spec_decoding_position_offsets = row.repeat(requests, 1)
            return
        storage, num_gens = spec_tree_manager.slot_storage, batch_size - num_contexts
        slots = storage.all_ids_buf[num_contexts:batch_size]
        assert self.spec_decoding_position_offsets is not None and self.spec_decoding_packed_mask is not None
        self.spec_decoding_position_offsets[: num_gens * nodes].view(num_gens, nodes).copy_(
            storage.position_offsets[slots][:, :nodes]
        )
        words = -(-nodes // 32)
        self.spec_decoding_packed_mask[:num_gens, :nodes, :words].copy_(
            storage.packed_mask[slots][..., :words]
        )

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device())
