"""A request inside the engine: what was asked, how far it is, and what it produced."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.engine.output import OutputText
from trtllm_tree.errors import RequestError
from trtllm_tree.outputs import TokenLogprobs


@dataclass
class Request:
    """One request.

    Attributes:
        stop_ids: token ids that may end it, the model's own included.
        bad_words: token sequences that it may not generate.
        logprobs: of the output's tokens, if wanted.
        prompt_logprobs: of the prompt's tokens so far, the first None.
        seed: of the sampled tokens: the caller's, or one drawn for this request.
        committed_len: tokens in the KV cache; below the prompt's length while prefilling.
        token_limit: prompt length plus max_tokens.
        slot: pool slot while it runs, else None.
        promised_pages: pages per cache group that admission counted for it.
        accept_lens: tokens kept by each decode step it took part in.
        num_pruned_drafts: drafted tokens that its grammar forbade.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    output: OutputText
    seed: int = 0
    stop_ids: list[int] = field(default_factory=list)
    bad_words: list[tuple[int, ...]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    committed_len: int = 0
    slot: int | None = None
    promised_pages: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)
    num_pruned_drafts: int = 0
    finish_reason: str | None = None
    error: RequestError | None = None

    @property
    def token_limit(self) -> int:
        """Prompt plus budget."""
        return len(self.prompt_ids) + self.params.max_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt is not in the cache yet."""
        return self.committed_len < len(self.prompt_ids)
