"""What a caller gets back: results shaped as in TensorRT-LLM and vLLM, plus acceptance statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from trtllm_tree.errors import RequestError


@dataclass
class AcceptanceStats:
    """How a request's tokens came out of its target decode forwards.

    `accept_lens[i]` is the number of tokens kept by the i-th decode forward, the root's prediction (bonus
    token) included; plain decoding keeps 1 each time. The token that prefill predicts is not in here.
    Tokens that a stop condition cut off are not counted. `num_pruned_drafts` drafted tokens were forbidden by the
    request's grammar before they were verified.
    """

    accept_lens: list[int] = field(default_factory=list)
    num_pruned_drafts: int = 0

    @property
    def target_forwards(self) -> int:
        """Target decode forwards this request took part in."""
        return len(self.accept_lens)

    @property
    def tokens_per_forward(self) -> float:
        """Mean tokens per target decode forward; 0.0 before the first one."""
        return sum(self.accept_lens) / len(self.accept_lens) if self.accept_lens else 0.0

    @property
    def num_accepted_drafts(self) -> int:
        """Draft tokens that were kept: every kept token but one per forward (a failed forward kept none)."""
        return sum(max(length - 1, 0) for length in self.accept_lens)

    def histogram(self) -> dict[int, int]:
        """Forwards by number of tokens kept, ascending."""
        return dict(sorted(Counter(self.accept_lens).items()))


@dataclass(frozen=True)
class Logprob:
    """A token's natural log-probability by the model's raw logits, and its rank among all, 1 the likeliest."""

    logprob: float
    rank: int


# By token id: the token itself first, then the likeliest that were asked for.
TokenLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One generated sequence.

    Attributes:
        token_ids: generated ids, the stop token included when one ended the sequence.
        text: the detokenised ids, cut before a stop string.
        finish_reason: None while running, then "stop", "length", "cancelled" or "error".
        stop_reason: the stop token id or stop string that ended it, else None.
        logprobs: one dict for each of `token_ids`; None unless asked for.
        cumulative_logprob: sum over the chosen tokens; None unless logprobs were asked for.
        text_diff, token_ids_diff, logprobs_diff: what the latest streamed update added.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    logprobs_diff: list[TokenLogprobs] | None = None

    @property
    def length(self) -> int:
        """Number of generated tokens: the completion's usage."""
        return len(self.token_ids)


@dataclass
class RequestOutput:
    """The state of one request: its prompt, its output, and how its tokens were accepted."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    acceptance: AcceptanceStats
    finished: bool = False
    error: RequestError | None = None
    # One a prompt token, None for the first; None unless asked for.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def avg_decoded_tokens_per_iter(self) -> float:
        """TensorRT-LLM's name for `acceptance.tokens_per_forward`."""
        return self.acceptance.tokens_per_forward
