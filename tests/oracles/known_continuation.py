"""A drafter that knows the answer: candidates contain the target's true next token with a fixed probability.

Random heads propose nothing that a target accepts. With this scorer in place of the head's, accepted paths are
long, have branches, and differ between requests, whatever the head computes. A lane off the true path is offered
the true token as well, so that the right token often hangs under a wrong parent.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch

from trtllm_tree.draft.eagle import Candidates
from trtllm_tree.llm import LLM
from trtllm_tree.ports import RoundBatch
from trtllm_tree.sampling.base import Accepted
from trtllm_tree.tree.future import FutureWindows


class KnownContinuation:
    """Replaces the candidate scorer of one LLM's drafter.

    Args:
        llm: an LLM with speculation.
        truths: the plain continuation of each prompt; positions behind its end get random candidates.
        hit_rate: probability that a row's candidates contain the true token.
        seed: of the candidates.
    """

    def __init__(
        self,
        llm: LLM,
        truths: Mapping[tuple[int, ...], Sequence[int]],
        monkeypatch: pytest.MonkeyPatch,
        *,
        hit_rate: float = 0.7,
        seed: int = 0,
    ) -> None:
        assert llm.spec_round is not None, "plain decoding has no drafter"
        self._engine, self._truths, self._hit_rate = llm.engine, truths, hit_rate
        self._random = random.Random(seed)
        self._rows: list[tuple[tuple[int, ...], int]] = []
        self._step = 0
        drafter = llm.spec_round.drafter
        self._topk = drafter._topk
        self._draft_behind = drafter._draft_behind
        monkeypatch.setattr(drafter, "_draft_behind", self._start_round)
        monkeypatch.setattr(drafter, "_score_candidates", self._score)

    def _start_round(
        self,
        batch: RoundBatch,
        last_hidden: torch.Tensor,
        root: torch.Tensor,
        frontier: torch.Tensor,
        future: FutureWindows | None,
    ) -> Candidates:
        prompts = {request.slot: tuple(request.prompt_ids) for request in self._engine._scheduler.running}
        self._rows = [
            (prompts[slot], position)
            for slot, position in zip(batch.slots.tolist(), frontier.tolist(), strict=True)
        ]
        self._step = 0
        return self._draft_behind(batch, last_hidden, root, frontier, future)

    def _score(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stands in for `Eagle._score_candidates`: rows [M, H] are equally many lanes of each request."""
        lanes = hidden.shape[0] // len(self._rows)
        scores, ids = [], []
        for prompt, frontier in self._rows:
            # The root sits at the frontier, so the children of step s are for position frontier + 1 + s.
            index = frontier + 1 + self._step - len(prompt)
            truth = self._truths[prompt][index] if index < len(self._truths[prompt]) else None
            for _ in range(lanes):
                ids.append(self._candidates(truth))
                scores.append(sorted((-self._random.expovariate(1.0) for _ in ids[-1]), reverse=True))
        self._step += 1
        device = hidden.device
        return (
            torch.tensor(scores, dtype=torch.float32, device=device),
            torch.tensor(ids, dtype=torch.int32, device=device),
        )

    def _candidates(self, truth: int | None) -> list[int]:
        tokens = self._random.sample([token for token in range(3, 300) if token != truth], self._topk)
        if truth is not None and self._random.random() < self._hit_rate:
            rank = self._random.randrange(self._topk) if self._random.random() < 0.5 else 0
            tokens[rank] = truth
        return tokens


class RoundLog:
    """A round observer that keeps what it sees on the host.

    `verified` has per round the pool slots, accept_lens and paths (None for a chain); `drafted` per round the
    pool slots, tokens, parents (None for a chain) and scores.
    """

    def __init__(self, llm: LLM) -> None:
        self.verified: list[tuple[list[int], list[int], list[list[int]] | None]] = []
        self.drafted: list[
            tuple[list[int], list[list[int]], list[list[int]] | None, torch.Tensor | None]
        ] = []
        assert llm.spec_round is not None, "plain decoding has no rounds"
        llm.spec_round.observer = self

    def on_drafted(self, slots: torch.Tensor, candidates: Candidates) -> None:
        parents = None if candidates.parents is None else candidates.parents.tolist()
        scores = None if candidates.scores is None else candidates.scores.clone()
        self.drafted.append((slots.tolist(), candidates.tokens.tolist(), parents, scores))

    def on_verified(self, slots: torch.Tensor, accepted: Accepted) -> None:
        path = None if accepted.path is None else accepted.path.tolist()
        self.verified.append((slots.tolist(), accepted.accept_len.tolist(), path))

    @property
    def accept_lens(self) -> list[int]:
        """Of every request and round."""
        return [length for _, lengths, _ in self.verified for length in lengths]

    @property
    def has_moved_rows(self) -> bool:
        """Whether a path was kept whose rows were not in front already."""
        paths = [
            path[:length]
            for _, lengths, ps in self.verified
            for path, length in zip(ps or [], lengths, strict=False)
        ]
        return any(path != list(range(len(path))) for path in paths)
