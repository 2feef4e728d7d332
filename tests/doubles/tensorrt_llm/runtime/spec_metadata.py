"""What one step of one-model speculation knows: rows to verify, and the features that the target leaves."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from .layout import NEW, device
from .mode import SpeculativeDecodingMode
from .spec_tree import DynamicTreeSlotStorage


@dataclass
class SpecMetadata:
    """Common to all modes."""

    max_num_requests: int
    max_draft_len: int
    max_total_draft_tokens: int
    num_generations: int = 0
    is_cuda_graph: bool = False
    spec_dec_mode: SpeculativeDecodingMode = SpeculativeDecodingMode.NONE
    draft_tokens: torch.Tensor | None = None
    gather_ids: torch.Tensor | None = None
    request_ids: list[int] | None = None
    seq_lens: list[int] | None = None
    num_tokens: int = 0
    num_layers: int = 0
    is_spec_dec_tree: bool = False
    is_spec_dec_dynamic_tree: bool = False
    runtime_draft_len: int = 0
    runtime_tokens_per_gen_step: int = 1
    is_all_greedy_sample: bool = True
    use_rejection_sampling: bool = False
    vocab_size: int = 0
    draft_vocab_size: int = 0
    all_rank_num_tokens: list[int] | None = None
    subseq_all_rank_num_tokens: list[int] | None = None

    def create_cuda_graph_metadata(self, max_batch_size: int) -> Any:
        """A copy with buffers of its own."""
        assert not self.is_cuda_graph
        graph = copy.copy(self)
        graph.is_cuda_graph, graph.max_num_requests = True, max_batch_size
        graph.__post_init__()
        return graph

    def __post_init__(self) -> None: ...

    def prepare(self) -> None: ...

    def is_layer_capture(self, layer_id: int) -> bool:
        return False

    def maybe_capture_hidden_states(
        self, layer_id: int, hidden_states: Any, residual: Any = None
    ) -> None: ...


@dataclass
class Eagle3OneModelSpecMetadata(SpecMetadata):
    """Features of `layers_to_capture`, counted by the layers whose output is kept; none are for an MTP layer."""

    hidden_states: torch.Tensor | None = None
    layers_to_capture: Any = None
    hidden_size: int = 0
    max_num_tokens: int = 0
    dtype: torch.dtype = torch.bfloat16
    batch_indices_cuda: torch.Tensor | None = None
    spec_resource_manager: Any = None
    # Of the generation requests' trees, for recurrent layers: first children and next siblings.
    retrieve_next_token: torch.Tensor | None = None
    retrieve_next_sibling: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.batch_indices_cuda = torch.zeros(self.max_num_requests, dtype=torch.int32, device=device())
        if self.spec_dec_mode.is_mtp_eagle_one_model():
            self.layers_to_capture = ()
            return
        if self.layers_to_capture is None:
            if self.num_layers <= 5:
                raise ValueError("too few layers for EAGLE3's usual ones")
            self.layers_to_capture = (1, self.num_layers // 2 - 1, self.num_layers - 4)
        self.layers_to_capture = sorted(self.layers_to_capture)
        width = self.hidden_size * len(self.layers_to_capture)
        self.hidden_states = torch.full(
            (self.max_num_tokens, width), float("nan"), dtype=self.dtype, device=device()
        )

    def is_layer_capture(self, layer_id: int) -> bool:
        return layer_id in self.layers_to_capture

    def prepare(self) -> None:
        assert self.request_ids is not None and self.batch_indices_cuda is not None
        size = len(self.request_ids)
        self.batch_indices_cuda[:size].copy_(torch.arange(size, dtype=torch.int32))
        self.num_tokens -= self.num_generations * self.runtime_draft_len
        self.retrieve_next_token = self.retrieve_next_sibling = None
        # Versions whose storage has no links do not ask for them.
        has_links = hasattr(DynamicTreeSlotStorage, "next_links_from_slots")
        if self.is_spec_dec_dynamic_tree and self.num_generations and has_links:
            storage = self.spec_resource_manager.spec_tree_manager.slot_storage
            slots = storage.all_ids_buf[size - self.num_generations : size]
            links = storage.next_links_from_slots(slots, self.num_generations)
            if not NEW:
                storage.apply_no_tree_linear_chain(*links, slots, self.num_generations)
            self.retrieve_next_token, self.retrieve_next_sibling = links

    def maybe_capture_hidden_states(self, layer_id: int, hidden_states: Any, residual: Any = None) -> None:
        if layer_id not in self.layers_to_capture:
            return
        assert self.hidden_states is not None
        place = self.layers_to_capture.index(layer_id) * self.hidden_size
        rows = hidden_states if residual is None else hidden_states + residual
        self.hidden_states[: rows.shape[0], place : place + self.hidden_size].copy_(rows)
