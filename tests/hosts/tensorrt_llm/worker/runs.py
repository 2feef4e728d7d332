"""What the worker is asked to generate, and who watches it do so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.hosts.tensorrt_llm.tree_runs import prompts_of

TOKENS = 24
# More than a batch holds, around page borders: prompts arrive while others decode, and end at different steps.
PROMPTS = prompts_of(5, 31, 33, 64, 1, 40)
LENGTHS = (TOKENS, 9, TOKENS, 3, 17, TOKENS)

Pair = tuple[Path, Path]


class Rounds:
    """Every drafted window and every accepted length."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.parents: list[Any] = []
        self.scores: list[torch.Tensor] = []
        self.accepted: list[Any] = []

    def on_drafted(self, slots: torch.Tensor, candidates: Any) -> None:
        self.tokens.append(candidates.tokens.tolist())
        self.parents.append(candidates.parents.tolist())
        self.scores.append(candidates.scores.cpu().clone())

    def on_verified(self, slots: torch.Tensor, accepted: Any) -> None:
        self.accepted.append(accepted.accept_len.tolist())


class Windows:
    """What was drafted for each slot."""

    def __init__(self) -> None:
        self.of: dict[int, list[Any]] = {}

    def on_drafted(self, slots: torch.Tensor, candidates: Any) -> None:
        rows = zip(slots.tolist(), candidates.tokens.tolist(), candidates.parents.tolist(), strict=True)
        for slot, tokens, parents in rows:
            self.of.setdefault(slot, []).append((tokens, parents))

    def on_verified(self, slots: torch.Tensor, accepted: Any) -> None: ...


def run(executor: Any, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Generate LENGTHS tokens of each prompt; returns the requests."""
    sampling = options.get("sampling") or [None] * len(prompts)
    requests = [
        executor.submit(prompt, max_tokens=count, sampling=config)
        for prompt, count, config in zip(prompts, options.get("counts", LENGTHS), sampling, strict=False)
    ]
    while executor.step():
        pass
    return requests
