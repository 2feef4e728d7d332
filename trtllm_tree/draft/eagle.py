"""The EAGLE drafter: step 0 is the chain's; behind it either chain steps or K-lane tree steps.

After a verify step the drafter runs its layer over the accepted rows (step 0), takes the last accepted row, and
drafts from there. With a tree it scores the K best children of every lane and lets `DraftTree` record and
select; with a chain it follows the best child. `_score_candidates` is the one place that decides how
candidates are scored. (EAGLE-3, arXiv 2503.01840; seed "Draft lanes", "The drafter scores, the tree selects".)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.kernels.accepted_rows import accepted_rows
from trtllm_tree.kernels.logprob_topk import logprob_topk, workspace_shape
from trtllm_tree.ports import DraftModel, RoundBatch
from trtllm_tree.tree.draft_tree import DraftTree
from trtllm_tree.tree.future import FutureWindows
from trtllm_tree.tree.lanes import TreeDraftInputs


@dataclass(frozen=True)
class Candidates:
    """What a round leaves for the next one: tokens int32 [B, N], root first.

    `parents` int32 [B, N] and `scores` float32 [B, N] (cumulative log-probabilities) are None for a chain.
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class Eagle:
    """Drafts the next window for up to `max_batch` requests in fixed-address buffers.

    Args:
        model: the host's draft model.
        config: K, S, N. `topk` 1 builds no tree state.
        max_batch: rows of every buffer.
        vocab_size: columns of the draft model's logits.
        device: where the buffers live.
    """

    def __init__(
        self,
        model: DraftModel,
        config: SpeculativeConfig,
        *,
        max_batch: int,
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        self._model = model
        self._topk, self._num_steps = config.tree_topk, config.num_steps
        self._path_len = config.max_path_len
        ints, longs = {"dtype": torch.int32, "device": device}, {"dtype": torch.int64, "device": device}
        topk = self._topk
        self._step0_tokens = torch.zeros(max_batch, self._path_len, **ints)
        self._last_rows = torch.zeros(max_batch, **longs)
        self._scores = torch.zeros(max_batch * topk, topk, dtype=torch.float32, device=device)
        self._ids = torch.zeros(max_batch * topk, topk, **ints)
        self._topk_workspace = torch.zeros(
            workspace_shape(max_batch * topk, vocab_size), dtype=torch.float32, device=device
        )
        self._root = torch.zeros(max_batch, **ints)
        self._tree: DraftTree | None = None
        self._lanes: TreeDraftInputs | None = None
        if config.is_tree:
            self._lanes = TreeDraftInputs(max_batch, topk, config.num_steps, device)
            self._tree = DraftTree(
                max_batch,
                topk=topk,
                num_steps=config.num_steps,
                num_nodes=config.num_nodes,
                hidden_size=model.hidden_size,
                dtype=model.dtype,
                device=device,
            )
        else:
            self._chain_frontier = torch.zeros(max_batch, **ints)
            self._chain_tokens = torch.zeros(max_batch, config.num_nodes, **ints)
            self._chain_positions = torch.zeros(max_batch, 1, **longs)

    def draft(
        self,
        batch: RoundBatch,
        predict: torch.Tensor,
        accept_len: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        *,
        future: FutureWindows | None = None,
    ) -> Candidates:
        """Draft after a verify step whose window is a chain again.

        Args:
            predict: int32 [B, N], kept target tokens packed to the front.
            accept_len: int32 [B].
            features: target features [B, N, F], the kept rows in front.
            positions: int64 [B, N], vc + i.
            future: receives drafted trees as the next windows of the batch's pool slots; a chain ignores it.
        """
        size, width = predict.shape[0], self._path_len
        # Step 0 takes the longest possible path, not N rows: later rows cannot have been accepted.
        tokens, last_rows = self._step0_tokens[:size], self._last_rows[:size]
        root, lanes = self._root[:size], self._lanes
        frontier = self._chain_frontier[:size] if lanes is None else lanes.frontier[:size]
        accepted_rows(
            predict,
            accept_len,
            batch.committed_lens,
            tokens=tokens,
            last_rows=last_rows,
            roots=root,
            frontier=frontier,
            lanes=None if lanes is None else lanes.rows(size, batch.draft_page_table, batch.draft_page_size),
        )
        hidden = self._model.fuse(features[:, :width])
        hidden = self._model.chain_rows(tokens, hidden, positions[:, :width], batch, last_rows)
        return self._draft_behind(batch, hidden.squeeze(1), root, frontier, future)

    def draft_from(
        self,
        batch: RoundBatch,
        last_hidden: torch.Tensor,
        root: torch.Tensor,
        frontier: torch.Tensor,
        *,
        future: FutureWindows | None = None,
    ) -> Candidates:
        """Draft where no window was verified: behind a prefill.

        Args:
            last_hidden: [B, H], the draft model's output at the last row.
            root: int32 [B], the token of the next root.
            frontier: int32 [B], accepted keys in the draft cache.
            future: as for `draft`.
        """
        if self._lanes is not None:
            self._lanes.begin(frontier, batch.draft_page_table, batch.draft_page_size)
        return self._draft_behind(batch, last_hidden, root, frontier, future)

    def _draft_behind(
        self,
        batch: RoundBatch,
        last_hidden: torch.Tensor,
        root: torch.Tensor,
        frontier: torch.Tensor,
        future: FutureWindows | None,
    ) -> Candidates:
        """Draft behind the last accepted row, the lanes standing in place."""
        scores, ids = self._score_candidates(last_hidden)
        if self._tree is None or self._lanes is None:
            return self._chain_steps(batch, ids, last_hidden, root, frontier)
        tokens, hidden = self._seed_tree_lanes(self._tree, self._lanes, scores, ids, last_hidden)
        self._tree_steps(self._tree, self._lanes, batch, tokens, hidden)
        drafted = self._tree.select(root, slots=batch.slots, future=future)
        return Candidates(tokens=drafted.tokens, parents=drafted.parents, scores=drafted.scores)

    def _score_candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities float32 [M, K] and target-vocabulary ids int32 [M, K] of rows [M, H]."""
        rows = hidden.shape[0]
        return logprob_topk(
            self._model.logits(hidden),
            self._topk,
            d2t=self._model.d2t,
            scores=self._scores[:rows],
            ids=self._ids[:rows],
            workspace=self._topk_workspace,
        )

    def _seed_tree_lanes(
        self,
        tree: DraftTree,
        lanes: TreeDraftInputs,
        scores: torch.Tensor,
        ids: torch.Tensor,
        last_hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The root's K children become the lanes of step 1."""
        return tree.expand(0, scores.unsqueeze(1), ids.unsqueeze(1), last_hidden.unsqueeze(1), lanes)

    def _tree_steps(
        self,
        tree: DraftTree,
        lanes: TreeDraftInputs,
        batch: RoundBatch,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        size, topk = tokens.shape
        for step in range(1, self._num_steps):
            lanes.active = True
            out = self._model.lane_rows(step, tokens, hidden, lanes, batch)
            lanes.active = False
            scores, ids = self._score_candidates(out.reshape(size * topk, -1))
            grid = (size, topk, topk)
            tokens, hidden = tree.expand(step, scores.view(grid), ids.view(grid), out, lanes)

    def _chain_steps(
        self,
        batch: RoundBatch,
        ids: torch.Tensor,
        last_hidden: torch.Tensor,
        root: torch.Tensor,
        frontier: torch.Tensor,
    ) -> Candidates:
        size = root.shape[0]
        tokens, positions = self._chain_tokens[:size], self._chain_positions[:size]
        tokens[:, 0].copy_(root)
        tokens[:, 1].copy_(ids[:, 0])
        positions.copy_(frontier.unsqueeze(1))
        hidden = last_hidden.unsqueeze(1)
        for step in range(1, self._num_steps):
            hidden = self._model.chain_rows(tokens[:, step : step + 1], hidden, positions, batch)
            _, ids = self._score_candidates(hidden.squeeze(1))
            tokens[:, step + 1].copy_(ids[:, 0])
            positions.add_(1)
        return Candidates(tokens=tokens)
