"""Invariant I14: sampled verify keys its noise by position.

The target's token at a row is a Gumbel-max draw whose noise is a function of the request's seed, the position that
the drawn token will have, and the token id: never of the row, the batch or the tree. A node's token will lie one
behind the node, at vc + depth + 1, so every row on the accepted path draws what plain decoding draws there, and
the walk along the draws keeps plain decoding's tokens. Requests at temperature 0 get the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.kernels.greedy_tokens import greedy_tokens
from trtllm_tree.kernels.greedy_tokens import workspace_shape as greedy_workspace_shape
from trtllm_tree.kernels.sampled_tokens import gathered_shape, sampled_tokens, workspace_shape
from trtllm_tree.sampling.base import Accepted
from trtllm_tree.sampling.walk import WalkSampler
from trtllm_tree.tree.verify_batch import TreeVerifyBatch

_MAX_INT32 = 2**31 - 1


class SlotDraws:
    """The sampling parameters of every pool slot, and the draw of rows by them. All buffers have fixed addresses.

    A batch in which nobody samples takes the argmax op: it is the same law, and costs less. So does a draw where nobody
    filters (top-k, top-p, min-p).

    Args:
        num_slots: pool slots, the dummy one included; a slot that was never set is greedy.
        max_rows: largest number of rows in one draw.
        device: where the buffers live.
    """

    def __init__(self, num_slots: int, max_rows: int, *, device: torch.device | str) -> None:
        longs = {"dtype": torch.int64, "device": device}
        self.is_greedy, self._filters = False, True
        self._sampled: set[int] = set()
        self._filtered: set[int] = set()
        self._seeds = torch.zeros(num_slots, **longs)
        # Temperature, top_k, top_p, min_p; the floats by their bits, so that one gather reads all four.
        self._options = torch.zeros(4, num_slots, dtype=torch.int32, device=device)
        self._row_slots = torch.zeros(max_rows, **longs)
        self._row_seeds = torch.zeros(max_rows, **longs)
        self._row_positions = torch.zeros(max_rows, **longs)
        self._row_options = torch.zeros(4 * max_rows, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # What ops that draw need beside their arguments; one call after the other, they may share it.
        self.buffers = {
            "workspace": torch.zeros(workspace_shape(max_rows), **longs),
            "gathered": torch.empty(gathered_shape(max_rows), **longs),
        }
        self._greedy_workspace = torch.zeros(greedy_workspace_shape(max_rows), **longs)

    @property
    def kind(self) -> str:
        """See `engine.ports.TokenDraws`."""
        return "greedy" if self.is_greedy else "filtered" if self._filters else "plain"

    def reset(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A request with valid `params` and this seed, 0 <= seed < 2**64, takes pool slot `slot`."""
        top_p = 1.0 if params.top_p is None else params.top_p
        filters = params.is_sampled and bool(params.top_k or top_p < 1 or params.min_p)
        for slots, holds in ((self._sampled, params.is_sampled), (self._filtered, filters)):
            (slots.add if holds else slots.discard)(slot)
        floats = torch.tensor([params.temperature or 0.0, top_p, params.min_p or 0.0])
        temperature, top_p_bits, min_p = floats.view(torch.int32).tolist()
        top_k = min(params.top_k or 0, _MAX_INT32)
        self._options[:, slot] = torch.tensor([temperature, top_k, top_p_bits, min_p], dtype=torch.int32)
        # Two's complement: the key's 64 bits are what counts.
        self._seeds[slot] = seed - 2**64 if seed >= 2**63 else seed

    def plan(self, slots: Sequence[int]) -> None:
        """See `engine.ports.TokenDraws`."""
        self.is_greedy = self._sampled.isdisjoint(slots)
        self._filters = not self._filtered.isdisjoint(slots)

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The target's tokens behind some rows; allocates nothing and never waits for the device.

        Args:
            logits: [B*R, V] of the rows.
            slots: int64 [B], the requests' pool slots.
            positions: int64 [B, R], where the rows lie; their tokens lie one further.

        Returns:
            int32 [B*R], overwritten by the next draw; -1 where a logit is NaN.
        """
        num_rows = positions.numel()
        tokens = self._tokens[:num_rows]
        if self.is_greedy:
            return greedy_tokens(logits, tokens=tokens, workspace=self._greedy_workspace)
        parameters = self.row_parameters(slots, positions)
        return sampled_tokens(logits, **parameters, tokens=tokens, **self.buffers, filters=self._filters)

    def row_parameters(self, slots: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the ops that draw want to know of each row; arguments as for `draw`, overwritten by the next call."""
        num_rows = positions.numel()
        row_slots, seeds = self._row_slots[:num_rows], self._row_seeds[:num_rows]
        predicted = self._row_positions[:num_rows]
        options = self._row_options[: 4 * num_rows].view(4, num_rows)
        row_slots.view(positions.shape).copy_(slots.unsqueeze(1).expand(positions.shape))
        torch.index_select(self._seeds, 0, row_slots, out=seeds)
        torch.index_select(self._options, 1, row_slots, out=options)
        torch.add(positions, 1, out=predicted.view(positions.shape))
        return {
            "seeds": seeds,
            "positions": predicted,
            "temperatures": options[0].view(torch.float32),
            "top_ks": options[1],
            "top_ps": options[2].view(torch.float32),
            "min_ps": options[3].view(torch.float32),
        }


class GumbelSampler(WalkSampler):
    """Walks the draws.

    Args:
        draws: of the engine's pool slots, at least max_batch * num_nodes rows.
        max_batch, num_nodes, device, tree: as in `WalkSampler`.
    """

    name: ClassVar[str] = "gumbel"

    def __init__(
        self, draws: SlotDraws, max_batch: int, num_nodes: int, *, device: torch.device | str, tree: bool
    ) -> None:
        super().__init__(max_batch, num_nodes, device=device, tree=tree)
        self._draws = draws

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
        target = self._draws.draw(logits, slots, positions).view(tokens.shape)
        return self.accept(tokens, target, tree=tree)
