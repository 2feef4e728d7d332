"""Invariant I9: draft lanes write the draft cache like any draft step.

Steps 1 .. S-1 run K lane rows per request. Lane r of step s has position frontier + s - 1 and writes the
draft-cache slot of frontier + (s - 1) * K + r; it sees the accepted frontier and, in the window of
W = (S - 1) * K slots behind it, only its ancestors and itself (`lane_mask`). The slots are inside the next
verify window ((S - 1) * K <= N), where the target's next forward overwrites them: nothing outlives the round.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.accepted_rows import LaneRows
from trtllm_tree.kernels.window_slots import window_slots
from trtllm_tree.tree.topology import mask_words


class TreeDraftInputs:
    """What lane attention reads, at fixed addresses, written within the round.

    Lengths, positions and slots are written once per round: within a decode round by `accepted_rows`, into
    `frontier` and `rows`; behind a prefill by `begin`. `draft_tree_expand` writes the masks of the next step.
    `active` is True exactly while a lane forward runs.
    """

    def __init__(self, max_batch: int, topk: int, num_steps: int, device: torch.device | str) -> None:
        self.topk = topk
        self.window = (num_steps - 1) * topk  # W
        self.active = False
        self.frontier = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self.lane_mask = torch.zeros(
            max_batch, topk, mask_words(self.window), dtype=torch.int64, device=device
        )  # [max_batch, K, words]
        self._step_index = torch.arange(num_steps - 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_batch, num_steps - 1, dtype=torch.int64, device=device)
        self._slots = torch.zeros(max_batch, self.window, dtype=torch.int32, device=device)

    def rows(self, batch: int, page_table: torch.Tensor, page_size: int) -> LaneRows | None:
        """Where `accepted_rows` puts positions and slots of B = `batch` requests; None if S is 1.

        Args:
            page_table: int32 [B, max_pages] of the draft cache.
            page_size: KV rows of a page.
        """
        if not self.window:
            return None
        return LaneRows(self._positions[:batch], self._slots[:batch], page_table, page_size)

    def begin(self, frontier: torch.Tensor, page_table: torch.Tensor, page_size: int) -> None:
        """Start the lanes of a round that accepted nothing: the first, behind a prefill.

        Args:
            frontier: int32 [B], accepted keys in the draft cache.
            page_table: int32 [B, max_pages] of the draft cache.
            page_size: KV rows of a page.
        """
        batch = frontier.shape[0]
        self.frontier[:batch].copy_(frontier)
        if self.window:
            torch.add(frontier.unsqueeze(1), self._step_index, out=self._positions[:batch])
            window_slots(
                frontier, page_table, num_rows=self.window, page_size=page_size, slots=self._slots[:batch]
            )

    def positions(self, step: int, batch: int) -> torch.Tensor:
        """RoPE positions int64 [B, K] of step 1 .. S-1: every lane of a step has the same depth."""
        return self._positions[:batch, step - 1 : step].expand(batch, self.topk)

    def slots(self, step: int, batch: int) -> torch.Tensor:
        """Draft-cache slots int32 [B, K] of step 1 .. S-1."""
        return self._slots[:batch, (step - 1) * self.topk : step * self.topk]
