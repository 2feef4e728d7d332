"""Log-probabilities of the kept tokens and of the likeliest ones beside them, by the target's raw logits.

Raw is what vLLM calls raw_logprobs: before temperature, penalties, bans and grammars. Only the rows of the accepted
path are looked at, on the device, and only what was asked for leaves it. Must not know requests.

Legend: B requests, R rows of each, D kept rows at most, V vocabulary, n likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_tree.sampling.edits import LogitEdits

# Few sizes, so that few steps are captured.
_SIZES = (1, 5, 20)
_CHUNK = 256


class TargetLogprobs:
    """See `engine.ports.LogprobReader`.

    Args:
        edits: what changes the logits in between. A request that is edited itself and wants its log-probabilities has
            the step's raw logits copied, on the device: a rank needs the token's whole row, and which row and token
            are kept is known behind the edits only. Nothing else is copied.

    Attributes:
        kind: n, and whether the raw logits are copied; None: nothing is wanted.
    """

    def __init__(self, edits: LogitEdits) -> None:
        self._edits = edits
        self._wanted: dict[int, int] = {}
        self._raw: torch.Tensor | None = None
        self.kind: tuple[int, bool] | None = None

    def reset(self, slot: int, num_top: int | None) -> None:
        """A request that wants `num_top` likeliest tokens, or nothing, takes pool slot `slot`."""
        self._wanted.pop(slot, None)
        if num_top is not None:
            self._wanted[slot] = num_top

    def plan(self, slots: Sequence[int]) -> None:
        """The next rows are of these pool slots, and pad rows."""
        wanted = [slot for slot in slots if slot in self._wanted]
        self.kind = None
        if wanted:
            most = max(self._wanted[slot] for slot in wanted)
            self.kind = next(size for size in _SIZES if size >= most), self._edits.edits_any(wanted)

    def keep(self, logits: torch.Tensor) -> None:
        """Remember `logits` [B*R, V], which may be edited now and must otherwise stay until `take`."""
        self._raw = None
        if self.kind is not None:
            self._raw = logits.clone() if self.kind[1] else logits

    def take(
        self, path: torch.Tensor | None, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What was asked for of the kept rows; None if nothing was.

        Args:
            path: int32 [B, >= D], each request's kept rows, -1 behind them; None for the rows in order.
            tokens: int32 [B, D], the tokens behind those rows, -1 where there is none.

        Returns:
            values float32 [B, D, 1 + n], the token's first; ids int64 alike; ranks int64 [B, D] of the tokens.
        """
        if self.kind is None:
            return None
        assert self._raw is not None, "no logits were kept"
        raw, self._raw = self._raw, None
        batch, depth = tokens.shape
        first = torch.arange(batch, device=raw.device) * (raw.shape[0] // batch)
        parts = []
        # One kept row a request at a time: the intermediate results are [B, V].
        for index in range(depth):
            row = first + (index if path is None else path[:, index].clamp(min=0))
            parts.append(self._score(raw.index_select(0, row), tokens[:, index], self.kind[0]))
        values, ids, ranks = (torch.stack(part, dim=1) for part in zip(*parts, strict=True))
        return values, ids, ranks

    def score(
        self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `take`, of the tokens int64 [M] behind the rows `logits` [M, V]; without the dimension D."""
        size = next(size for size in _SIZES if size >= num_top)
        chunks = zip(logits.split(_CHUNK), tokens.split(_CHUNK), strict=True)
        parts = [self._score(rows, chosen, size) for rows, chosen in chunks]
        values, ids, ranks = (torch.cat(part) for part in zip(*parts, strict=True))
        return values, ids, ranks

    def _score(
        self, rows: torch.Tensor, tokens: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = rows.float()
        chosen = tokens.long().clamp(min=0).unsqueeze(1)
        logit = rows.gather(1, chosen)
        best, ids = rows.topk(min(num_top, rows.shape[1]), dim=1)
        values = torch.cat([logit, best], dim=1) - rows.logsumexp(dim=1, keepdim=True)
        return values, torch.cat([chosen, ids], dim=1), 1 + (rows > logit).sum(dim=1)
