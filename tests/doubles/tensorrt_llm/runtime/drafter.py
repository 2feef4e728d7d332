"""The host-driven drafter's base class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final


class Drafter(ABC):
    """Fills `py_draft_tokens` of the scheduled requests before each target step."""

    _needs_padding_kv_extension = False

    def __init__(
        self, max_draft_len=None, max_total_draft_tokens=None, max_concurrency=None, draft_len_schedule=None
    ):
        self.max_draft_len, self.max_total_draft_tokens = max_draft_len, max_total_draft_tokens
        self._static_max_total_draft_tokens = max_total_draft_tokens
        self.max_concurrency, self.draft_len_schedule = max_concurrency, draft_len_schedule

    @abstractmethod
    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
        raise NotImplementedError

    @final
    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        for request in scheduled_requests.generation_requests:
            missing = self.max_total_draft_tokens - len(request.py_draft_tokens)
            request.py_draft_tokens = [*request.py_draft_tokens, *[0] * missing]
