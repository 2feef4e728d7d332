"""Stores what a step's worker returns by slot, and tells requests what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .layout import device
from .requests import LlmRequest, LlmRequestState, ScheduledRequests


@dataclass
class SampleState:
    """One step's results: host copies, and whose they are."""

    requests: list[LlmRequest]
    new_tokens: torch.Tensor
    new_tokens_lens: torch.Tensor
    next_draft_tokens: torch.Tensor


class SpecSampler:
    """Decides nothing: the worker has."""

    def __init__(
        self, *, max_draft_len: int, max_total_draft_tokens: int, num_slots: int, max_seq_len: int
    ) -> None:
        self.draft_len, self.max_path_len, self.max_seq_len = (
            max_total_draft_tokens,
            max_draft_len + 1,
            max_seq_len,
        )
        place = {"dtype": torch.int32, "device": device()}
        self.new_tokens = torch.zeros(self.max_path_len, num_slots, 1, **place)
        self.next_new_tokens = torch.zeros(max_total_draft_tokens + 1, num_slots, 1, **place)
        self.next_draft_tokens = torch.zeros(num_slots, max_total_draft_tokens, **place)
        self.new_tokens_lens = torch.zeros(num_slots, **place)

    def sample_async(self, batch: ScheduledRequests, outputs: dict[str, Any]) -> SampleState:
        """Scatter to the slots, dummies left out; the copies here wait, the real ones do not."""
        skipped = len(batch.context_requests_chunking)
        requests = [one for one in batch.all_requests()[skipped:] if not one.is_cuda_graph_dummy]
        rows = slice(skipped, skipped + len(requests))
        slots = torch.tensor([one.py_seq_slot for one in requests], dtype=torch.int64, device=device())
        assert outputs["next_new_tokens"].shape[1] == self.draft_len + 1, outputs["next_new_tokens"].shape
        assert outputs["next_draft_tokens"].shape[1] == self.draft_len, outputs["next_draft_tokens"].shape
        new_tokens = outputs["new_tokens"][rows, : self.max_path_len]
        assert new_tokens.shape[1] == self.max_path_len, outputs["new_tokens"].shape
        self.new_tokens.squeeze(-1).T.index_copy_(0, slots, new_tokens)
        self.next_new_tokens.squeeze(-1).T.index_copy_(0, slots, outputs["next_new_tokens"][rows])
        self.new_tokens_lens.index_copy_(0, slots, outputs["new_tokens_lens"][rows])
        self.next_draft_tokens.index_copy_(0, slots, outputs["next_draft_tokens"][rows])
        for request in batch.context_requests[skipped:]:
            # So that the next step's blocks are reserved before its drafts are known on the host.
            request.py_draft_tokens = [1] * self.draft_len
        stored = (self.new_tokens, self.new_tokens_lens, self.next_draft_tokens)
        # Copies, also of what is on the host: the next step overwrites the slots.
        return SampleState(requests, *(tensor.to("cpu", copy=True) for tensor in stored))

    def update_requests(self, state: SampleState) -> None:
        for request in state.requests:
            if request.state == LlmRequestState.GENERATION_COMPLETE:
                continue
            slot = request.py_seq_slot
            assert slot is not None
            count = int(state.new_tokens_lens[slot])
            assert 1 <= count <= self.max_path_len, f"{count} tokens in one step"
            if request.generated:
                request.accepted_history.append(count - 1)
            for token in state.new_tokens[:count, slot, 0].tolist():
                request.tokens.append(token)
                if self._ends(request, token):
                    request.state = LlmRequestState.GENERATION_COMPLETE
                    break
            request.py_num_accepted_draft_tokens = count - 1
            request.py_rewind_len = self.draft_len - (count - 1)
            request.py_draft_tokens = state.next_draft_tokens[slot].tolist()
            request.py_decoding_iter += 1

    def _ends(self, request: LlmRequest, token: int) -> bool:
        full = len(request.tokens) >= self.max_seq_len
        return token in request.end_ids or full or len(request.generated) >= request.py_max_new_tokens
