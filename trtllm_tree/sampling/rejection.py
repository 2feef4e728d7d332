"""Recursive rejection sampling: exact in the target's law, whatever drew the tree, but not plain decoding's draw.

A node's children are tried one after the other against the target's law behind the node; a rejected one's share is
taken out of the law, and when none is left the next token is drawn from what remains. Which token that makes is told by
the node's own row, so it is settled for all rows at once, and the kept path is the walk along these tokens. Noise is
keyed by seed, position and sibling, never by row or batch, so a seed repeats for the same drafts. Requests at
temperature 0 get the argmax.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trtllm_tree.kernels.rejection_tokens import rejection_tokens
from trtllm_tree.sampling.base import Accepted
from trtllm_tree.sampling.gumbel import SlotDraws
from trtllm_tree.sampling.walk import WalkSampler
from trtllm_tree.tree.topology import chain_parents
from trtllm_tree.tree.verify_batch import TreeVerifyBatch


class TreeRejectionSampler(WalkSampler):
    """Accepts or rejects children by the target's law.

    Args:
        draws: of the engine's pool slots, at least max_batch * num_nodes rows.
        max_batch, num_nodes, device, tree: as in `WalkSampler`.
        future_draft_probs: float32 [num_slots, N, Vd], by pool slot the probabilities that each node's children of the
            next window were drawn from, written by the drafter beside the candidates; a row of zeros says that they
            were chosen. None: all are, as the likeliest K are.
    """

    name: ClassVar[str] = "rejection"

    def __init__(
        self,
        draws: SlotDraws,
        max_batch: int,
        num_nodes: int,
        *,
        device: torch.device | str,
        tree: bool,
        future_draft_probs: torch.Tensor | None = None,
    ) -> None:
        super().__init__(max_batch, num_nodes, device=device, tree=tree)
        self._draws, self._future = draws, future_draft_probs
        self._target = torch.zeros(max_batch * num_nodes, dtype=torch.int32, device=device)
        self._chains = chain_parents(num_nodes, device).repeat(max_batch, 1)
        self._probs = None
        if future_draft_probs is not None:
            self._probs = future_draft_probs.new_zeros(max_batch, *future_draft_probs.shape[1:])

    def verify(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        *,
        tree: TreeVerifyBatch | None,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> Accepted:
        """See `SamplingBackend.verify`."""
        if self._draws.is_greedy:
            target = self._draws.draw(logits, slots, positions)
        else:
            target = rejection_tokens(
                logits,
                tokens,
                self._chains[: tokens.shape[0]] if tree is None else tree.parents,
                **self._draws.row_parameters(slots, positions),
                draft_probs=self._draft_probs(slots),
                tokens=self._target[: tokens.numel()],
                **self._draws.buffers,
            )
        return self.accept(tokens, target.view(tokens.shape), tree=tree)

    def _draft_probs(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Those of this step's windows [B, N, Vd], at a fixed address."""
        if self._future is None or self._probs is None:
            return None
        return torch.index_select(self._future, 0, slots, out=self._probs[: slots.shape[0]])
