"""Greedy verification: the target's token is the argmax, ties to the lower id.

A row with a NaN logit gets token -1, which matches no candidate, so it ends the accepted path.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trtllm_tree.kernels.greedy_tokens import greedy_tokens, workspace_shape
from trtllm_tree.sampling.base import Accepted
from trtllm_tree.sampling.walk import WalkSampler
from trtllm_tree.tree.verify_batch import TreeVerifyBatch


class GreedySampler(WalkSampler):
    """Walks the argmax, for rounds in which no request samples; arguments as in `WalkSampler`."""

    name: ClassVar[str] = "greedy"

    def __init__(self, max_batch: int, num_nodes: int, *, device: torch.device | str, tree: bool) -> None:
        super().__init__(max_batch, num_nodes, device=device, tree=tree)
        num_rows = max_batch * num_nodes
        self._target = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._workspace = torch.zeros(workspace_shape(num_rows), dtype=torch.int64, device=device)

    def target_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's choice int32 [B, N] at every row of `logits` [B*N, V]; -1 where a logit is NaN."""
        target = self._target[: logits.shape[0]]
        tokens = greedy_tokens(logits, tokens=target, workspace=self._workspace)
        return tokens.view(-1, self._num_nodes)

    def verify(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        *,
        tree: TreeVerifyBatch | None,
        slots: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> Accepted:
        """See `SamplingBackend.verify`; an argmax needs no slots and no positions."""
        return self.accept(tokens, self.target_tokens(logits), tree=tree)
