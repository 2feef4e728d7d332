"""Watches the ports between a host and the core: every call of a round's draft model and sampling backend."""

from __future__ import annotations

from typing import Any

import torch

from trtllm_tree.ports import RoundBatch
from trtllm_tree.round import SpecRound
from trtllm_tree.sampling.base import Accepted
from trtllm_tree.tree.lanes import TreeDraftInputs


class PortWatch:
    """Stands in for a round's draft model and sampling backend: checks every call against `ports`, and keeps it.

    Attributes:
        drafts: (method, tokens, positions, result) of every draft forward.
        verified: (predict, accept_len, path) of every verify step.
    """

    def __init__(self, spec_round: SpecRound) -> None:
        self._model, self._sampler = spec_round.drafter._model, spec_round.sampler
        self.drafts: list[tuple[str, Any, Any, torch.Tensor]] = []
        self.verified: list[tuple[Any, Any, Any]] = []
        self.hidden_size, self.dtype, self.d2t = self._model.hidden_size, self._model.dtype, self._model.d2t
        self._nodes, self._path_len = spec_round.num_nodes, spec_round.max_path_len
        spec_round.drafter._model, spec_round.sampler = self, self  # type: ignore[assignment]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        out = self._model.fuse(features)
        self._check_rows(out, features.shape[:-1])
        rows = self._model.fuse(features.flatten(0, -2))
        torch.testing.assert_close(out.flatten(0, -2), rows, msg="fuse mixes rows")
        self.drafts.append(("fuse", None, None, out.clone()))
        return out

    def chain_rows(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: RoundBatch,
        last_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        everything = self._model.chain_rows(token_ids, hidden, positions, batch)
        self._check_rows(everything, token_ids.shape)
        # A second time writes the same rows again.
        out = self._model.chain_rows(token_ids, hidden, positions, batch, last_rows)
        wanted = everything if last_rows is None else everything.flatten(0, 1)[last_rows].unsqueeze(1)
        torch.testing.assert_close(out, wanted, msg="last_rows does more than choose")
        self.drafts.append(("chain", token_ids.tolist(), positions.tolist(), out.clone()))
        return out

    def lane_rows(
        self,
        step: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        lanes: TreeDraftInputs,
        batch: RoundBatch,
    ) -> torch.Tensor:
        out = self._model.lane_rows(step, token_ids, hidden, lanes, batch)
        self._check_rows(out, token_ids.shape)
        positions = lanes.positions(step, len(token_ids))
        self.drafts.append((f"lanes {step}", token_ids.tolist(), positions.tolist(), out.clone()))
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._model.logits(hidden)
        assert out.dim() == 2 and len(out) == len(hidden)
        assert self.d2t is None or (self.d2t.dtype, self.d2t.shape) == (torch.int64, out.shape[1:])
        self.drafts.append(("logits", None, None, out.clone()))
        return out

    def verify(self, logits: torch.Tensor, tokens: torch.Tensor, **options: Any) -> Accepted:
        size, tree = len(tokens), options["tree"]
        assert logits.shape[0] == tokens.numel() and tokens.shape[1] == self._nodes
        kept = self._sampler.verify(logits, tokens, **options)
        for value in (kept.predict, kept.path):
            assert value is not None and (value.dtype, value.shape) == (torch.int32, (size, self._nodes))
        assert kept.path is not None and kept.accept_len.shape == (size,)
        for row, length in enumerate(kept.accept_len.tolist()):
            path, predict = kept.path[row].tolist(), kept.predict[row].tolist()
            assert 1 <= length <= self._path_len
            assert path[0] == 0 and path[length:] == predict[length:] == [-1] * (self._nodes - length)
            depths = tree.depths[row].tolist()
            assert [depths[node] for node in path[:length]] == list(range(length))
            # What the target said at a kept node is the token of the next one.
            assert [int(tokens[row, node]) for node in path[1:length]] == predict[: length - 1]
        self.verified.append((kept.predict.tolist(), kept.accept_len.tolist(), kept.path.tolist()))
        return kept

    def _check_rows(self, rows: torch.Tensor, lead: torch.Size) -> None:
        assert rows.shape == (*lead, self.hidden_size) and rows.dtype == self.dtype
        assert bool(torch.isfinite(rows).all())
