"""Invariant I2: a chain is the tree `parent[i] = i - 1`.

Owns the smallest facts about tree shape. A tree is `parents` int32 [B, N]: the root (row 0) has -1, and a
parent's index is below its child's. `depths` and `ancestor_mask` follow from it (`kernels.tree_ancestors`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def mask_words(num_bits: int) -> int:
    """64-bit words needed for `num_bits` mask bits, at least one."""
    return max(1, -(-num_bits // 64))


def chain_parents(num_nodes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Parents int32 [N] of the chain of `num_nodes` nodes: -1, 0, 1, ..."""
    return torch.arange(-1, num_nodes - 1, dtype=torch.int32, device=device)


def is_chain(parents: Sequence[int]) -> bool:
    """Whether host-side `parents` [N] describe the chain."""
    return all(parent == node - 1 for node, parent in enumerate(parents))
