"""The trees of one verify step, handed to the sampling backend; a chain has none (None is passed)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeVerifyBatch:
    """Trees whose N nodes one target forward verifies.

    Attributes:
        parents: int32 [B, N], root -1, a parent's index below its child's.
        depths: int32 [B, N], 0 at the root.
        ancestor_mask: int64 [B, N, words], bit j of node i set when j is i or an ancestor of i.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestor_mask: torch.Tensor
