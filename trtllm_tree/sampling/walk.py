"""From the target's tokens to the accepted path: the walk that every backend with one target token a row takes.

Acceptance is equality with the target's token, so it is exact for any drafter whose children are what they are
whatever the target says. It must not know how the target's tokens came about.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trtllm_tree.kernels.verify_tree import verify_tree
from trtllm_tree.sampling.base import Accepted, SamplingBackend
from trtllm_tree.tree.verify_batch import TreeVerifyBatch


class WalkSampler(SamplingBackend):
    """A backend that keeps the rows reached along the target's tokens.

    Args:
        max_batch: rows of every buffer.
        num_nodes: N, rows of one request's window.
        device: where the buffers live.
        tree: whether trees will be verified; a chain keeps no path.
    """

    supports_tree_verify: ClassVar[bool] = True

    def __init__(self, max_batch: int, num_nodes: int, *, device: torch.device | str, tree: bool) -> None:
        ints = {"dtype": torch.int32, "device": device}
        self._num_nodes = num_nodes
        self._flag = torch.zeros(max_batch * num_nodes, dtype=torch.bool, device=device)
        self._predict = torch.zeros(max_batch, num_nodes, **ints)
        self._accept_len = torch.zeros(max_batch, **ints)
        self._path = torch.zeros(max_batch, num_nodes, **ints) if tree else None
        self._match = torch.zeros(max_batch, num_nodes, **ints)
        self._row_index = torch.arange(num_nodes, **ints)

    def accept(self, tokens: torch.Tensor, target: torch.Tensor, *, tree: TreeVerifyBatch | None) -> Accepted:
        """Keep the path of `tokens` int32 [B, N] that agrees with `target` int32 [B, N]; -1 there ends it."""
        return self._walk_chain(tokens, target) if tree is None else self._walk_tree(tokens, target, tree)

    def _walk_tree(self, tokens: torch.Tensor, target: torch.Tensor, tree: TreeVerifyBatch) -> Accepted:
        batch = tokens.shape[0]
        assert self._path is not None, "a sampler built for chains was given a tree"
        path, accept_len, predict = self._path[:batch], self._accept_len[:batch], self._predict[:batch]
        verify_tree(tokens, tree.parents, target, path=path, accept_len=accept_len, predict=predict)
        return Accepted(predict=predict, accept_len=accept_len, path=path)

    def _walk_chain(self, tokens: torch.Tensor, target: torch.Tensor) -> Accepted:
        batch, rows = tokens.shape
        match, accept_len, predict = self._match[:batch], self._accept_len[:batch], self._predict[:batch]
        # Row i is kept when every candidate up to i equals the target's choice at the row before it.
        match[:, 0] = 1
        torch.eq(tokens[:, 1:], target[:, :-1], out=match[:, 1:])
        torch.cumprod(match, dim=1, dtype=torch.int32, out=match)
        torch.sum(match, dim=1, dtype=torch.int32, out=accept_len)
        flag = self._flag[: batch * rows].view(batch, rows)
        torch.ge(self._row_index.expand(batch, rows), accept_len.unsqueeze(1), out=flag)
        predict.copy_(target).masked_fill_(flag, -1)
        return Accepted(predict=predict, accept_len=accept_len, path=None)
