"""Trees by slot: what the attention of the next step reads of each request's tree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .layout import NEW, device
from .resources import BaseResourceManager


class DynamicTreeSlotStorage:
    """Buffers [slots + 1, ...]; the last slot is that of requests which only pad."""

    def __init__(self, num_slots, n_dt, mask_width, top_k=1):
        self.dummy_slot_id, slots = num_slots, num_slots + 1
        self._chain_offsets, self._chain_mask = _kary_tree(n_dt, mask_width, 1)
        self.position_offsets = self._chain_offsets.repeat(slots, 1)
        self.packed_mask = self._chain_mask.repeat(slots, 1, 1)
        # Requests that pad have a K-ary tree, unlike slots without one.
        self.position_offsets[-1], self.packed_mask[-1] = _kary_tree(n_dt, mask_width, top_k)
        place = {"dtype": torch.int32, "device": device()}
        self._chain_next = torch.arange(1, n_dt + 1, **place)
        self._chain_next[-1] = -1
        self.retrieve_index = torch.zeros(slots, n_dt, **place)
        self.retrieve_next_token = self._chain_next.repeat(slots, 1)
        self.retrieve_next_sibling = torch.full((slots, n_dt), -1, **place)
        self.has_tree = torch.zeros(slots, dtype=torch.bool, device=device())
        self.all_ids_buf = torch.zeros(num_slots, dtype=torch.long, device=device())
        self._links = torch.zeros(2, num_slots, n_dt, **place)

    def fill_all_slot_ids(self, context_requests, generation_requests):
        ids = [self._slot(request) for request in (*context_requests, *generation_requests)]
        self.all_ids_buf[: len(ids)].copy_(torch.tensor(ids, dtype=torch.long))

    def _slot(self, request: Any) -> int:
        pads = request.py_seq_slot is None or request.is_cuda_graph_dummy
        return self.dummy_slot_id if pads else request.py_seq_slot

    def mark_valid(self, slot_ids, count):
        self.has_tree[slot_ids[:count]] = True
        self.has_tree[self.dummy_slot_id] = False

    def next_links_from_slots(self, slot_ids, count):
        for links, of_slots in zip(
            self._links, (self.retrieve_next_token, self.retrieve_next_sibling), strict=True
        ):
            links[:count].copy_(of_slots[slot_ids[:count]])
        return self._links[0, :count], self._links[1, :count]

    if not NEW:

        def apply_no_tree_linear_chain(self, next_token, next_sibling, slot_ids, count):
            without = ~self.has_tree[slot_ids[:count]][:, None]
            next_token.copy_(torch.where(without, self._chain_next, next_token))
            next_sibling.masked_fill_(without, -1)
            return next_token, next_sibling

    def mark_invalid(self, slot_id):
        self.has_tree[slot_id] = False
        self.packed_mask[slot_id], self.position_offsets[slot_id] = self._chain_mask, self._chain_offsets
        self.retrieve_index[slot_id], self.retrieve_next_sibling[slot_id] = 0, -1
        self.retrieve_next_token[slot_id] = self._chain_next


def _kary_tree(nodes: int, words: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths [N] and ancestor words [N, words] of the tree in which node i hangs under (i - 1) // top_k."""
    depths, masks = [0], [1]
    for node in range(1, nodes):
        parent = (node - 1) // max(top_k, 1)
        depths.append(depths[parent] + 1)
        masks.append(masks[parent] | 1 << node)
    packed = [[(mask >> 32 * word) & 0xFFFFFFFF for word in range(words)] for mask in masks]
    return (
        torch.tensor(depths, dtype=torch.int32, device=device()),
        torch.tensor(packed, dtype=torch.int64).to(torch.int32).to(device()),
    )


class SpecTreeManager:
    """Holds the slots' storage."""

    slot_storage = None
    use_dynamic_tree = True

    def __init__(self, max_num_requests, max_total_draft_tokens, max_draft_len, dynamic_tree_max_topK):
        self.num_trees = max_num_requests
        self.max_total_draft_tokens, self.max_draft_len = max_total_draft_tokens, max_draft_len
        self.dynamic_tree_max_topK = dynamic_tree_max_topK
        nodes = max_total_draft_tokens + 1
        self._internal_buf_dim = max(nodes, (dynamic_tree_max_topK or 0) * max_draft_len)
        self.slot_storage = DynamicTreeSlotStorage(
            max_num_requests, nodes, -(-nodes // 32), dynamic_tree_max_topK
        )


class Eagle3OneModelDynamicTreeResourceManager(BaseResourceManager):
    """Carries the tree manager under SPEC_RESOURCE_MANAGER."""

    def __init__(self, spec_config: Any, max_num_requests: int) -> None:
        self.max_num_requests = max_num_requests
        self.spec_tree_manager = SpecTreeManager(
            max_num_requests, spec_config.tokens_per_gen_step - 1, spec_config.max_draft_len,
            spec_config.dynamic_tree_max_topK,
        )  # fmt: skip
        self.slot_manager = SimpleNamespace(get_slot=lambda request_id: request_id)

    def free_resources(self, request: Any) -> None:
        """The slot is another request's from now on."""
        if request.py_seq_slot is not None:
            self.spec_tree_manager.slot_storage.mark_invalid(request.py_seq_slot)

    def get_max_resource_count(self) -> int:
        return self.max_num_requests

    def get_needed_resource_to_completion(self, request: Any) -> int:
        return 0


class MTPEagleDynamicTreeResourceManager(Eagle3OneModelDynamicTreeResourceManager):
    """The tree manager, and slots of hidden states, which requests take and give back."""

    def __init__(self, config, dtype, hidden_size, max_num_requests, sa_manager=None):
        super().__init__(config, max_num_requests)
        self.sa_manager = sa_manager
        self.mtp_past_hidden_states_pool = torch.zeros(
            max_num_requests, 1, hidden_size, dtype=dtype, device=device()
        )
        # One more, for the dummy.
        self._free, self._slots = list(range(max_num_requests + 1))[::-1], {}

    def prepare_resources(self, scheduled_batch: Any) -> None:
        first = [one for one in scheduled_batch.context_requests if one.is_first_context_chunk]
        self.add_dummy_requests([request.py_request_id for request in first])

    def add_dummy_requests(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            assert request_id not in self._slots
            self._slots[request_id] = self._free.pop()

    def free_resources(self, request: Any) -> None:
        super().free_resources(request)
        self._free.append(self._slots.pop(request.py_request_id))
