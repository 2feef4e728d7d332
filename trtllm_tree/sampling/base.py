"""Invariant I1: the tree is a parameter of the chain path, and the accepted path has one owner.

A sampling backend chooses the target's token at every window row and decides which rows are kept. Its
`Accepted` is the only statement of that; every consumer (KV, hidden rows, recurrent state, the drafter)
receives it as an argument. A chain passes `tree=None`, and no path is then built: it would be 0, 1, 2, ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from trtllm_tree.tree.verify_batch import TreeVerifyBatch


@dataclass(frozen=True)
class Accepted:
    """What one verify step kept. Made by a sampling backend only.

    Attributes:
        predict: int32 [B, N], the kept rows' target tokens packed to the front (the last is the bonus
            token), -1 behind them; a kept -1 marks a row whose logits were not numbers.
        accept_len: int32 [B], kept rows, root included, >= 1.
        path: int32 [B, N], node ids kept, root first, increasing, -1 padded; None for a chain.
    """

    predict: torch.Tensor
    accept_len: torch.Tensor
    path: torch.Tensor | None


class SamplingBackend(ABC):
    """Chooses target tokens and the accepted path.

    Attributes:
        name: what it is called in reports.
        supports_tree_verify: whether it verifies trees; if not, trees are refused at startup.
    """

    name: ClassVar[str]
    supports_tree_verify: ClassVar[bool] = False

    @abstractmethod
    def verify(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        *,
        tree: TreeVerifyBatch | None,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> Accepted:
        """Decide one verify step.

        Args:
            logits: [B*N, V] of the window's rows.
            tokens: int32 [B, N], the window's tokens, root first.
            tree: the rows' tree, or None for a chain.
            slots: int64 [B], the requests' pool slots.
            positions: int64 [B, N], where the rows lie: vc + depth of a tree's nodes, vc + i of a chain's.
        """
