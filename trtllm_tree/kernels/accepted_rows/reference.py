"""Torch reference of `accepted_rows`: the CPU path."""

from __future__ import annotations

import torch

from trtllm_tree.kernels.accepted_rows.lane_rows import LaneRows


def reference(
    predict: torch.Tensor,
    accept_len: torch.Tensor,
    committed_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    last_rows: torch.Tensor,
    roots: torch.Tensor,
    frontier: torch.Tensor,
    lanes: LaneRows | None,
) -> None:
    """Write the outputs; arguments as in the op."""
    batch, width = tokens.shape
    usable = predict.clamp(min=0)
    tokens.copy_(usable[:, :width])
    last = accept_len.long() - 1
    roots.copy_(usable.gather(1, last.unsqueeze(1)).squeeze(1))
    last_rows.copy_(torch.arange(batch, device=predict.device) * width + last.clamp(max=width - 1))
    frontier.copy_(committed_lens + accept_len)
    if lanes is not None:
        _place_lanes(frontier.long(), lanes)


def _place_lanes(frontier: torch.Tensor, lanes: LaneRows) -> None:
    row = torch.arange(max(lanes.positions.shape[1], lanes.slots.shape[1]), device=frontier.device)
    position = frontier[:, None] + row
    lanes.positions.copy_(position[:, : lanes.positions.shape[1]])
    position = position[:, : lanes.slots.shape[1]]
    # One more column stands for every page beyond the table.
    pages = torch.nn.functional.pad(lanes.page_table.long().clamp(min=0), (0, 1))
    index = (position // lanes.page_size).clamp(max=pages.shape[1] - 1)
    lanes.slots.copy_(pages.gather(1, index) * lanes.page_size + position % lanes.page_size)
