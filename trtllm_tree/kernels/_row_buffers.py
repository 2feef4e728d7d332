"""The buffers of the ops that draw from whole rows: one set serves all of them, one call after the other.

Owns their shapes. It must not know what is drawn.
"""

from __future__ import annotations

import torch

# Rows with a top-k that gather their first ids, and how many; further rows search for theirs, which takes longer.
_GATHERING_ROWS = 4096
_GATHERED = 2048


def workspace_shape(num_rows: int) -> tuple[int, int]:
    """Shape of the int64 workspace.

    A row holds its best id so far with what makes it the best, as one number, and its largest logit so far or how many
    ids it gathered. It must be zero when it is first used; an op leaves it zero.
    """
    return num_rows, 2


def gathered_shape(num_rows: int) -> tuple[int, int]:
    """Shape of the int64 buffer that rows with a top-k gather their first ids in; it may hold anything."""
    return min(num_rows, _GATHERING_ROWS), _GATHERED


def row_buffers(
    logits: torch.Tensor, workspace: torch.Tensor | None, gathered: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both buffers for logits [M, V]: those given, once their shapes are checked, or new ones."""
    needed, room = workspace_shape(len(logits)), gathered_shape(len(logits))
    workspace = logits.new_zeros(needed, dtype=torch.int64) if workspace is None else workspace
    gathered = logits.new_empty(room, dtype=torch.int64) if gathered is None else gathered
    for name, buffer, shape in (("workspace", workspace, needed), ("gathered", gathered, room)):
        assert buffer.dtype == torch.int64 and buffer.is_contiguous(), f"{name} must be int64 rows"
        assert buffer.shape[0] >= shape[0] and buffer.shape[1:] == shape[1:], f"{name} is not {shape}"
    return workspace, gathered
