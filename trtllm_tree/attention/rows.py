"""The rows that cascades attend: a tree's to verify, a chain's; and their attention for whoever has them flat.

What a draft step's lanes see lies in `tree.lanes`. Must not know whose rows they are, nor how a leaf attends.
"""

from __future__ import annotations

import torch

from trtllm_tree.attention.cascade import TreeCascade, TreeCascadeRows
from trtllm_tree.kernels.tree_ancestors import tree_ancestors
from trtllm_tree.tree.topology import chain_parents
from trtllm_tree.tree.verify_batch import TreeVerifyBatch


def verify_rows(
    tree: TreeVerifyBatch, committed_lens: torch.Tensor, max_committed_len: int
) -> TreeCascadeRows:
    """The N nodes of each of B trees behind int32 [B] committed tokens, of which the host knows a bound."""
    return TreeCascadeRows(
        prefix_lens=committed_lens,
        mask=tree.ancestor_mask,
        window=tree.parents.shape[1],
        max_prefix_len=max_committed_len,
        row_depths=tree.depths,
        column_depths=tree.depths,
    )


class ChainRows:
    """Rows that follow one another: R of them are the tree parent[i] = i - 1. Keeps one mask for each R."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._masks: dict[int, torch.Tensor] = {}

    def behind(self, prefix_lens: torch.Tensor, num_rows: int, max_prefix_len: int) -> TreeCascadeRows:
        """R = `num_rows` behind each prefix of int32 [B]; without depths, so for layers that do not slide."""
        if num_rows not in self._masks:
            _, mask = tree_ancestors(chain_parents(num_rows, self._device).unsqueeze(0))
            self._masks[num_rows] = mask
        return TreeCascadeRows(
            prefix_lens=prefix_lens,
            mask=self._masks[num_rows].expand(prefix_lens.shape[0], -1, -1),
            window=num_rows,
            max_prefix_len=max_prefix_len,
        )


class TreeAttention:
    """A cascade bound to the rows of one forward, for flat queries [T, Hq, D]: T = B * R, request by request."""

    def __init__(self, cascade: TreeCascade, rows: TreeCascadeRows) -> None:
        self._cascade, self._rows = cascade, rows

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        scale: float,
        *,
        value_dim: int | None = None,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`TreeCascade.attend` over flat rows; returns [T, Hq, Dv]. The leaf was told `value_dim` by its shape."""
        batch, num_rows = self._rows.mask.shape[:2]
        folded = q.view(batch, num_rows, *q.shape[1:])
        out = self._cascade.attend(
            folded,
            k_cache,
            v_cache,
            page_table,
            self._rows,
            scale,
            sliding_window=sliding_window,
            sinks=sinks,
        )
        return out.flatten(0, 1)
