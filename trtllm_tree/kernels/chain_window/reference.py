"""Torch reference of `chain_window`: the CPU path."""

from __future__ import annotations

import torch


def reference(
    token_map: torch.Tensor,
    slots: torch.Tensor,
    committed_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write the outputs; arguments as in the op."""
    tokens.copy_(token_map[slots])
    row = torch.arange(positions.shape[1], device=positions.device)
    positions.copy_(committed_lens.unsqueeze(1) + row)
