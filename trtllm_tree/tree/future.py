"""Invariant I13: the next round's tree rides with the next round's tokens.

`FutureParentMap` keeps, per pool slot, the parents of the candidates that the drafter left there. The
tokens themselves are the chain's own state (the round's future input map). A slot that is reset (a new
request, recovery) holds the chain. `FutureWindows` is both maps, for who writes them: tree selection. Nothing else
of a tree crosses rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_tree.tree.topology import chain_parents


class FutureParentMap:
    """Parents int32 [num_slots, N] by pool slot."""

    def __init__(self, num_slots: int, num_nodes: int, device: torch.device | str) -> None:
        self._chain = chain_parents(num_nodes, device)
        self.parents = self._chain.repeat(num_slots, 1)

    def reset(self, slot: int) -> None:
        """Make `slot` the chain."""
        self.parents[slot].copy_(self._chain)


@dataclass(frozen=True)
class FutureWindows:
    """The next windows by pool slot: tokens and parents, both int32 [num_slots, N]."""

    tokens: torch.Tensor
    parents: torch.Tensor
