"""One round of speculative decoding, in the order of the picture in docs/architecture.md:

    future maps -> verify window -> positions -> [target forward by the host] -> accepted path
        -> compact KV, hidden rows, positions -> draft step 0, lanes, select -> future maps

A chain runs the same methods with `tree=None`: no tree state exists then. Apart from the model forwards,
everything here works on preallocated buffers of fixed shape and address and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Candidates, Eagle
from trtllm_tree.kernels.chain_window import chain_window
from trtllm_tree.ports import RoundBatch
from trtllm_tree.sampling.base import Accepted, SamplingBackend
from trtllm_tree.sampling.edits import LogitEdits
from trtllm_tree.tree.future import FutureParentMap, FutureWindows
from trtllm_tree.tree.spec import TreeSpec
from trtllm_tree.tree.verify_batch import TreeVerifyBatch


@dataclass(frozen=True)
class VerifyWindow:
    """The rows of one target forward: tokens int32 [B, N], positions int64 [B, N], and their tree if any."""

    tokens: torch.Tensor
    positions: torch.Tensor
    tree: TreeVerifyBatch | None


@dataclass(frozen=True)
class TreeParts:
    """What a round has only when it drafts trees."""

    spec: TreeSpec
    parents: FutureParentMap
    compactor: KVCompactor


class RoundObserver(Protocol):
    """Watches rounds, for the trace page and for tests. May copy to the host; never changes anything."""

    def on_drafted(self, slots: torch.Tensor, candidates: Candidates) -> None:
        """The next windows of pool slots int64 [B] were drafted."""
        ...

    def on_verified(self, slots: torch.Tensor, accepted: Accepted) -> None:
        """The windows of pool slots int64 [B] were verified."""
        ...


class SpecRound:
    """Speculative decoding for the pool slots of one engine.

    Args:
        config: K, S, N.
        drafter: proposes the next windows.
        sampler: owns the accepted path.
        hidden: [max_batch * N, F], the host's fixed buffer of target features of the window's rows.
        num_slots: pool slots, the dummy one included.
        tree: the tree's parts, or None for a chain.
        edits: change the logits before the sampler sees them; None where no request may ask for any.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        *,
        drafter: Eagle,
        sampler: SamplingBackend,
        hidden: torch.Tensor,
        num_slots: int,
        tree: TreeParts | None,
        edits: LogitEdits | None = None,
    ) -> None:
        assert config.is_tree == (tree is not None), "tree parts exist exactly when topk > 1"
        self.num_nodes, self.max_path_len = config.num_nodes, config.max_path_len
        self.drafter, self.sampler, self.tree, self.edits = drafter, sampler, tree, edits
        self.observer: RoundObserver | None = None
        self._hidden = hidden
        device, max_batch = hidden.device, hidden.shape[0] // config.num_nodes
        self.future_input_map = torch.zeros(num_slots, config.num_nodes, dtype=torch.int32, device=device)
        self.future = None if tree is None else FutureWindows(self.future_input_map, tree.parents.parents)
        self._tokens = torch.zeros(max_batch, config.num_nodes, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_batch, config.num_nodes, dtype=torch.int64, device=device)

    def reset(self, slot: int) -> None:
        """Make a pool slot that of a new request: dummy tokens, and the chain."""
        self.future_input_map[slot].zero_()
        if self.tree is not None:
            self.tree.parents.reset(slot)

    def drafted(self, slots: Sequence[int]) -> tuple[list[list[int]], list[list[int]] | None]:
        """Tokens [B][N] and parents [B][N] (None for chains) of pool slots' next windows; waits for the device."""
        index = torch.tensor(slots, device=self.future_input_map.device)
        parents = None if self.tree is None else self.tree.parents.parents[index].tolist()
        return self.future_input_map[index].tolist(), parents

    def open_window(self, batch: RoundBatch) -> VerifyWindow:
        """Read the candidates that the last round left for these requests."""
        size = batch.slots.shape[0]
        tokens, positions = self._tokens[:size], self._positions[:size]
        chain_window(
            self.future_input_map, batch.slots, batch.committed_lens, tokens=tokens, positions=positions
        )
        tree = None
        if self.tree is not None:
            tree = self.tree.spec.load_step(self.tree.parents.parents, batch.slots, positions)
        return VerifyWindow(tokens=tokens, positions=positions, tree=tree)

    def close_window(self, batch: RoundBatch, window: VerifyWindow, logits: torch.Tensor) -> Accepted:
        """Verify the window by the target's `logits` [B*N, V], keep the path, and draft the next window."""
        if self.edits is not None:
            self.edits.apply(logits, batch.slots, window.tokens, window.tree, window.positions)
        accepted = self.sampler.verify(
            logits, window.tokens, tree=window.tree, slots=batch.slots, positions=window.positions
        )
        self._compact(batch, window, accepted)
        features = self._hidden[: logits.shape[0]].view(*window.tokens.shape, -1)
        candidates = self.drafter.draft(
            batch,
            accepted.predict,
            accepted.accept_len,
            features,
            window.positions,
            future=self.future,
        )
        if self.observer is not None:
            self.observer.on_verified(batch.slots, accepted)
        self._hand_over(batch, candidates)
        return accepted

    def start(
        self, batch: RoundBatch, last_hidden: torch.Tensor, first_tokens: torch.Tensor, frontier: torch.Tensor
    ) -> None:
        """Draft the first window of requests whose prefill ended.

        Args:
            last_hidden: [B, H], the draft model's output at the prompt's last position.
            first_tokens: int32 [B], the token that prefill predicted.
            frontier: int32 [B], prompt lengths.
        """
        candidates = self.drafter.draft_from(batch, last_hidden, first_tokens, frontier, future=self.future)
        self._hand_over(batch, candidates)

    def _compact(self, batch: RoundBatch, window: VerifyWindow, accepted: Accepted) -> None:
        """Make the window a chain again."""
        if self.tree is None:
            return
        assert accepted.path is not None, "a tree was verified without a path"
        depth = self.max_path_len
        self.tree.compactor.compact_verify_window(accepted.path, batch.write_slots, max_depth=depth)
        self.tree.spec.compact_rows(accepted.path, window.positions, max_depth=depth)

    def _hand_over(self, batch: RoundBatch, candidates: Candidates) -> None:
        """Leave a chain's tokens for the next round. Of a tree, selection left tokens and parents already."""
        if self.future is None:
            self.future_input_map.index_copy_(0, batch.slots, candidates.tokens)
        if self.observer is not None:
            self.observer.on_drafted(batch.slots, candidates)
