"""A request as the scheduler, the managers and the sampler see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class LlmRequestState(Enum):
    CONTEXT_INIT = 0
    GENERATION_IN_PROGRESS = 1
    GENERATION_COMPLETE = 2


@dataclass
class SamplingConfig:
    """Values come in lists of one, as from the C++ side; None where the user said nothing."""

    beam_width: int = 1
    temperature: list[float] | None = None
    top_k: list[int] | None = None
    top_p: list[float] | None = None
    min_p: list[float] | None = None
    random_seed: list[int] | None = None


@dataclass(eq=False)
class LlmRequest:
    """One request, one beam."""

    py_request_id: int
    tokens: list[int]
    py_max_new_tokens: int = 0
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    end_ids: tuple[int, ...] = ()
    is_cuda_graph_dummy: bool = False
    py_seq_slot: int | None = None
    py_batch_idx: int | None = None
    state: LlmRequestState = LlmRequestState.CONTEXT_INIT
    py_draft_tokens: list[int] = field(default_factory=list)
    py_rewind_len: int = 0
    py_num_accepted_draft_tokens: int = 0
    py_num_accepted_draft_tokens_indices: list[int] = field(default_factory=list)
    py_decoding_iter: int = 0
    py_prompt_len: int = 0
    # A step of it was launched whose result the host does not know yet.
    pending_step: bool = False
    # Acceptance of every decode step, for tests.
    accepted_history: list[int] = field(default_factory=list)

    # Prompt tokens that were run, and those of the step that is scheduled.
    context_current_position: int = 0
    context_chunk_size: int = 0

    def __post_init__(self) -> None:
        self.py_prompt_len = self.py_prompt_len or len(self.tokens)
        self.context_chunk_size = self.py_prompt_len

    @property
    def request_id(self) -> int:
        return self.py_request_id

    @property
    def is_dummy(self) -> bool:
        return self.is_cuda_graph_dummy

    @property
    def max_beam_num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def prompt_len(self) -> int:
        return self.py_prompt_len

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == 0

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_current_position + self.context_chunk_size >= self.py_prompt_len

    def move_to_next_context_chunk(self) -> None:
        """A chunk was launched."""
        self.context_current_position += self.context_chunk_size

    def get_token(self, beam: int, position: int) -> int:
        return self.tokens[position]

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.py_prompt_len :]

    def get_tokens(self, beam: int = 0) -> list[int]:
        return self.tokens


def get_draft_token_length(request: Any) -> int:
    return len(request.py_draft_tokens or ())


@dataclass
class ScheduledRequests:
    """One step's batch."""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def num_context_requests(self) -> int:
        return len(self.context_requests)

    @property
    def num_generation_requests(self) -> int:
        return len(self.generation_requests)

    @property
    def batch_size(self) -> int:
        return self.num_context_requests + self.num_generation_requests

    @property
    def context_requests_chunking(self) -> list[LlmRequest]:
        """Those whose prompt does not end in this step; they are the first of the batch."""
        return [request for request in self.context_requests if not request.is_last_context_chunk]

    def all_requests(self) -> list[LlmRequest]:
        return self.context_requests + self.generation_requests
