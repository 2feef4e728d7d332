"""Invariant I12: the drafter scores, the tree selects; the same scores always give the same tree.

`DraftTree` records scored candidates and selects. It never looks at logits, and it knows no model. A request has
E = K + (S-1)K^2 entries: K children of the root, then K children of each of the K lanes of every later
step. An entry's score is the cumulative log-probability of its path; it never exceeds its parent's, and ties
go to the lower entry id, so the best N-1 entries are closed under parents: they are a tree (EAGLE-2, arXiv
2406.16858, section 4). Nodes are numbered depth first, best child first. NaN scores rank last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_tree.kernels.draft_tree_expand import draft_tree_expand
from trtllm_tree.kernels.draft_tree_select import draft_tree_select
from trtllm_tree.tree.future import FutureWindows
from trtllm_tree.tree.lanes import TreeDraftInputs


@dataclass(frozen=True)
class DraftedTree:
    """The selected trees: tokens int32 [B, N], parents int32 [B, N], scores float32 [B, N] (root 0)."""

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor


class DraftTree:
    """Candidate entries and lanes of up to `max_batch` requests, in fixed-address buffers.

    Args:
        max_batch: rows of every buffer.
        topk: K, lanes and children per lane.
        num_steps: S, draft forwards.
        num_nodes: N, root included.
        hidden_size: H, width of a lane's hidden row.
        dtype: dtype of the hidden rows.
        device: where the buffers live.
    """

    def __init__(
        self,
        max_batch: int,
        *,
        topk: int,
        num_steps: int,
        num_nodes: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_nodes = num_nodes
        entries = topk + (num_steps - 1) * topk * topk
        ints = {"dtype": torch.int32, "device": device}
        floats = {"dtype": torch.float32, "device": device}
        self._entry_scores = torch.zeros(max_batch, entries, **floats)
        self._entry_tokens = torch.zeros(max_batch, entries, **ints)
        self._entry_parents = torch.zeros(max_batch, entries, **ints)
        self._lane_entries = torch.zeros(max_batch, topk, **ints)
        self._lane_scores = torch.zeros(max_batch, topk, **floats)
        self._lane_tokens = torch.zeros(max_batch, topk, **ints)
        self._lane_hidden = torch.zeros(max_batch, topk, hidden_size, dtype=dtype, device=device)
        self._tokens = torch.zeros(max_batch, num_nodes, **ints)
        self._parents = torch.zeros(max_batch, num_nodes, **ints)
        self._scores = torch.zeros(max_batch, num_nodes, **floats)

    def expand(
        self,
        step: int,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        lanes: TreeDraftInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record one step's candidates and make the best K of them the next lanes.

        Args:
            step: 0 for the root's children, then 1 .. S-1.
            scores: float32 [B, L, K] log-probabilities, L = 1 at step 0 and K later. Clamped at 0.
            tokens: int32 [B, L, K] target-vocabulary ids.
            hidden: [B, L, H], the row that each lane's children continue from.
            lanes: receives the next lanes' ancestor masks.

        Returns:
            The next lanes' tokens int32 [B, K] and hidden rows [B, K, H].
        """
        batch = scores.shape[0]
        draft_tree_expand(
            scores,
            tokens,
            hidden,
            step=step,
            entry_scores=self._entry_scores[:batch],
            entry_tokens=self._entry_tokens[:batch],
            entry_parents=self._entry_parents[:batch],
            lane_entries=self._lane_entries[:batch],
            lane_scores=self._lane_scores[:batch],
            lane_tokens=self._lane_tokens[:batch],
            lane_mask=lanes.lane_mask[:batch],
            next_hidden=self._lane_hidden[:batch],
            window=lanes.window,
        )
        return self._lane_tokens[:batch], self._lane_hidden[:batch]

    def select(
        self,
        root_tokens: torch.Tensor,
        *,
        slots: torch.Tensor | None = None,
        future: FutureWindows | None = None,
    ) -> DraftedTree:
        """Keep the best N-1 entries under `root_tokens` int32 [B] (any stride) and number the nodes.

        Args:
            slots: int64 [B], given with `future`.
            future: receives the trees as the next windows of these pool slots.
        """
        batch = root_tokens.shape[0]
        drafted = DraftedTree(self._tokens[:batch], self._parents[:batch], self._scores[:batch])
        draft_tree_select(
            self._entry_scores[:batch],
            self._entry_tokens[:batch],
            self._entry_parents[:batch],
            root_tokens,
            num_nodes=self.num_nodes,
            tokens=drafted.tokens,
            parents=drafted.parents,
            node_scores=drafted.scores,
            slots=None if future is None else slots,
            future_tokens=None if future is None else future.tokens,
            future_parents=None if future is None else future.parents,
        )
        return drafted
