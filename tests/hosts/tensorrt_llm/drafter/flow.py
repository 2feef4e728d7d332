"""TensorRT-LLM's host-driven flow: an executor loop of the documented order of calls, on tiny models.

It puts placeholders for drafts on its requests, has them drafted and padded, verifies the last token and the drafts in
one forward of the target, keeps what agrees, and never tells the drafter anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

DRAFTER = "trtllm_tree.hosts.tensorrt_llm.drafter"
BASE = "tensorrt_llm._torch.speculative.drafter"
STEPS = 4


@dataclass
class Request:
    """What the flow looks at of TensorRT-LLM's request."""

    request_id: int
    tokens: list[int]
    py_orig_prompt_len: int
    py_max_new_tokens: int
    py_draft_tokens: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.py_orig_prompt_len :]

    @property
    def done(self) -> bool:
        return len(self.output) >= self.py_max_new_tokens

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


class Loop:
    """The executor without overlap. `drafter=None` decodes plainly."""

    def __init__(self, target_dir: Path, drafter: Any = None, *, num_drafts: int = STEPS) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
        self.drafter, self.num_drafts, self.forwards = drafter, num_drafts, 0

    def run(self, requests: list[Request], *, batch: int = 8) -> None:
        # A prompt's first token is there before its request drafts.
        if self.drafter is not None:
            self.drafter.prepare_draft_tokens(
                SimpleNamespace(context_requests=requests, generation_requests=[])
            )
        for request in requests:
            request.tokens.append(self._argmax(request.tokens)[-1])
        while live := [request for request in requests if not request.done]:
            self.step(live[:batch])
            # Requests that wait go first, as after a pause.
            requests = live[batch:] + live[:batch]

    def step(self, requests: list[Request]) -> None:
        scheduled = SimpleNamespace(context_requests=[], generation_requests=requests)
        for request in requests:
            request.py_draft_tokens = [0] * self.num_drafts if self.drafter is not None else []
        if self.drafter is not None:
            self.drafter.prepare_draft_tokens(scheduled, None)
            for request in requests:
                request.drafted.append(len(request.py_draft_tokens))
                assert all(type(token) is int for token in request.py_draft_tokens)
            if hasattr(self.drafter, "pad_draft_tokens_for_cuda_graph"):
                self.drafter.pad_draft_tokens_for_cuda_graph(scheduled, None)
        for request in requests:
            assert len(request.py_draft_tokens) <= self.num_drafts, (
                "more drafts than KV rows were reserved for"
            )
            chosen = self._argmax(request.tokens + request.py_draft_tokens)[len(request.tokens) - 1 :]
            kept = 0
            while not request.done:
                request.tokens.append(chosen[kept])
                if kept == len(request.py_draft_tokens) or request.py_draft_tokens[kept] != chosen[kept]:
                    break
                kept += 1
            request.accepted.append(kept)

    def _argmax(self, tokens: list[int]) -> list[int]:
        self.forwards += 1
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()


def make_requests(lengths: tuple[int, ...] = (1, 3, 17, 66), max_new: int = 24) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]
    return [Request(10 + i, list(p), len(p), max_new) for i, p in enumerate(prompts)]


def drafter_of(module: Any, folder: Path, topk: int, **options: Any) -> Any:
    options = {"max_draft_len": STEPS, "max_seq_len": 256, "dtype": "float32"} | options
    return module.TreeDrafter(str(folder), tree_topk=topk, **options)


def drafts_of(drafter: Any, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        request.py_draft_tokens = [0] * STEPS
    drafter.prepare_draft_tokens(SimpleNamespace(context_requests=[], generation_requests=requests))
    return [request.py_draft_tokens for request in requests]
