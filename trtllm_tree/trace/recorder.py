"""Records rounds on the host, as a `round.RoundObserver`. Knows no text and no page."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_tree.draft.eagle import Candidates
from trtllm_tree.sampling.base import Accepted


@dataclass(frozen=True)
class TracedRound:
    """One verify window and what the target kept of it.

    Attributes:
        slot: pool slot of the request.
        tokens: the N candidates, root first.
        parents: of each node; -1 for the root.
        scores: cumulative log-probabilities; None for a chain.
        path: node ids kept, root first.
        kept: the target's token after each node of `path`; the last is the bonus token, -1 if the logits
            were not numbers.
        num_output: leading tokens of `kept` that went to the output; a stop condition may cut the rest.
    """

    slot: int
    tokens: list[int]
    parents: list[int]
    scores: list[float] | None
    path: list[int]
    kept: list[int]
    num_output: int


@dataclass(frozen=True)
class _Window:
    tokens: list[int]
    parents: list[int]
    scores: list[float] | None


class TraceRecorder:
    """Pairs each verified window with its draft. Waits for the device, so a traced run is a slow one.

    Attributes:
        rounds: in the order of verification; those of one request by their `slot`.
    """

    def __init__(self) -> None:
        self.rounds: list[TracedRound] = []
        self._windows: dict[int, _Window] = {}

    def on_drafted(self, slots: torch.Tensor, candidates: Candidates) -> None:
        """See `RoundObserver.on_drafted`."""
        size, num_nodes = candidates.tokens.shape
        parents: list[list[int]] = [list(range(-1, num_nodes - 1))] * size
        scores: list[list[float] | None] = [None] * size
        if candidates.parents is not None:
            parents = candidates.parents.tolist()
        if candidates.scores is not None:
            scores = candidates.scores.tolist()
        windows = map(_Window, candidates.tokens.tolist(), parents, scores)
        self._windows.update(zip(slots.tolist(), windows, strict=True))

    def on_verified(self, slots: torch.Tensor, accepted: Accepted) -> None:
        """See `RoundObserver.on_verified`."""
        lengths, predict = accepted.accept_len.tolist(), accepted.predict.tolist()
        # A chain builds no path: it keeps the rows 0, 1, 2, ...
        paths = [list(range(row)) for row in lengths] if accepted.path is None else accepted.path.tolist()
        for slot, length, path, kept in zip(slots.tolist(), lengths, paths, predict, strict=True):
            window = self._windows.pop(slot)
            self.rounds.append(
                TracedRound(
                    slot=slot,
                    tokens=window.tokens,
                    parents=window.parents,
                    scores=window.scores,
                    path=path[:length],
                    kept=kept[:length],
                    num_output=length,
                )
            )
