"""Recurrent states: by request, and behind every node of a step; the managers of hybrids, and a layer's metadata."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .kv_cache import KVCacheManager, KVCacheManagerV2
from .layout import device


class MambaCacheManager:
    """One state a layer and slot; without an intermediate one a node where there is no speculation."""

    def make_states(
        self: Any,
        layers: list[int],
        width: int,
        *,
        max_batch_size: int,
        nodes: int,
        dtype: torch.dtype,
        replay: bool,
    ) -> None:
        # One slot more, for the dummy.
        place = {"dtype": dtype, "device": device()}
        self.states = torch.full((len(layers), max_batch_size + 1, width), float("nan"), **place)
        self.intermediate = torch.full((len(layers), max_batch_size, nodes, width), float("nan"), **place)
        # A layer of states has no window, and this in the place of one.
        self.max_attention_window_vec = [
            -1 if layer in layers else self.max_seq_len for layer in self.layer_offsets
        ]
        self._offset_of, self._replays = {layer: i for i, layer in enumerate(layers)}, replay
        self._free_states, self._state_of = list(range(max_batch_size + 1))[::-1], {}

    def keep_state_of(self, request_id: int) -> None:
        """Give a request a slot; what the last one left there is poison."""
        self._state_of[request_id] = slot = self._free_states.pop()
        self.states[:, slot] = float("nan")

    def drop_state_of(self, request_id: int) -> None:
        self._free_states.append(self._state_of.pop(request_id))

    def is_speculative(self) -> bool:
        return self.intermediate.shape[2] > 1

    @property
    def use_replay_state_update(self) -> bool:
        return self._replays

    def get_state_indices(self, request_ids: list[int], is_padding: list[bool] | None = None) -> list[int]:
        return [self._state_of[request_id] for request_id in request_ids]

    def mamba_layer_cache(self, layer_idx: int) -> Any:
        offset = self._offset_of[layer_idx]
        return SimpleNamespace(temporal=self.states[offset], intermediate_ssm=self.intermediate[offset])

    def update_mamba_states(
        self, attn_metadata, num_accepted_tokens, state_indices, accepted_leaf_positions=None
    ):
        first, size = attn_metadata.num_contexts, attn_metadata.num_generations
        positions = accepted_leaf_positions
        if positions is None:
            positions = num_accepted_tokens[first : first + size] - 1
        kept = self.intermediate[:, torch.arange(size, device=device()), positions.long()]
        self.states[:, state_indices[first : first + size].long()] = kept


class _Hybrid(MambaCacheManager):
    """What both generations' hybrids do besides: states come and go with the blocks."""

    def get_buffers(self: Any, layer_idx: int, kv_layout: str = "NHD") -> torch.Tensor | None:
        return None if layer_idx in self._offset_of else super().get_buffers(layer_idx, kv_layout)

    def prepare_resources(self: Any, scheduled_batch: Any) -> None:
        super().prepare_resources(scheduled_batch)
        for request in scheduled_batch.context_requests:
            if request.is_first_context_chunk:
                self.keep_state_of(request.py_request_id)

    def free_resources(self: Any, request: Any) -> None:
        super().free_resources(request)
        self.drop_state_of(request.py_request_id)

    def add_dummy_requests(self: Any, request_ids: list[int], num_rows: int) -> None:
        super().add_dummy_requests(request_ids, num_rows)
        for request_id in request_ids:
            self.keep_state_of(request_id)


class MambaHybridCacheManager(_Hybrid, KVCacheManager):
    """Of the V1 manager's views."""


class MambaHybridCacheManagerV2(_Hybrid, KVCacheManagerV2):
    """Of the V2 manager's."""


class Mamba2Metadata:
    """Which slot each request's states are in, at a fixed address."""

    def __init__(self, max_batch_size: int) -> None:
        self.state_indices = torch.zeros(max_batch_size, dtype=torch.int32, device=device())

    def prepare(self, attn_metadata: Any) -> None:
        ids = attn_metadata.kv_cache_manager.get_state_indices(attn_metadata.request_ids)
        self.state_indices[: len(ids)].copy_(torch.tensor(ids, dtype=torch.int32))
