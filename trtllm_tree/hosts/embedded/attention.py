"""The cascade for the engine's flat rows: bound to the trees of one forward, or to chains."""

from __future__ import annotations

import torch

from trtllm_tree.attention.cascade import TreeCascade, TreeCascadeRows
from trtllm_tree.kernels.tree_ancestors import tree_ancestors
from trtllm_tree.tree.topology import chain_parents


class CascadeDecodeAttention:
    """`engine.ports.DecodeAttentionFactory` over a one-pass leaf: R consecutive rows are the tree parent[i] = i - 1.

    Args:
        cascade: over a leaf that looks at no host-side length.
        device: where the masks live.
    """

    graph_safe = True

    def __init__(self, cascade: TreeCascade, device: torch.device) -> None:
        assert cascade.leaf.one_pass, "a leaf that needs host-side bounds cannot be captured"
        self._cascade, self._device = cascade, device
        self._masks: dict[int, torch.Tensor] = {}

    def __call__(self, kv_lens: torch.Tensor, num_rows: int, max_kv_len: int) -> TreeAttention:
        """See `engine.ports.DecodeAttentionFactory`."""
        if num_rows not in self._masks:
            _, mask = tree_ancestors(chain_parents(num_rows, self._device).unsqueeze(0))
            self._masks[num_rows] = mask
        rows = TreeCascadeRows(
            prefix_lens=kv_lens - num_rows,
            mask=self._masks[num_rows].expand(kv_lens.shape[0], -1, -1),
            window=num_rows,
            max_prefix_len=max_kv_len,
        )
        return TreeAttention(self._cascade, rows)


class TreeAttention:
    """An engine `AttentionBackend` whose rows are trees: R = rows of `rows.mask` a request."""

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
        """See `engine.ports.AttentionBackend.attend`; the leaf was told `value_dim` by its shape."""
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
