"""Torch reference of `accepted_rows`: the CPU path."""

from __future__ import annotations

import torch


def reference(
    predict: torch.Tensor,
    accept_len: torch.Tensor,
    committed_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    last_rows: torch.Tensor,
    roots: torch.Tensor,
    frontier: torch.Tensor,
) -> None:
    """Write the outputs; arguments as in the op."""
    batch, width = tokens.shape
    usable = predict.clamp(min=0)
    tokens.copy_(usable[:, :width])
    last = accept_len.long() - 1
    roots.copy_(usable.gather(1, last.unsqueeze(1)).squeeze(1))
    last_rows.copy_(torch.arange(batch, device=predict.device) * width + last.clamp(max=width - 1))
    frontier.copy_(committed_lens + accept_len)
