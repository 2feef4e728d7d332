"""Tree attention for the engine's flat rows: the cascade, bound to the trees of one forward."""

from __future__ import annotations

import torch

from trtllm_tree.attention.cascade import TreeCascade, TreeCascadeRows


class TreeAttention:
    """An engine `AttentionBackend` whose rows are trees: R = rows of `rows.mask` a request."""

    def __init__(self, cascade: TreeCascade, rows: TreeCascadeRows) -> None:
        self._cascade, self._rows = cascade, rows

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See `engine.ports.AttentionBackend.attend`."""
        batch, num_rows = self._rows.mask.shape[:2]
        folded = q.view(batch, num_rows, *q.shape[1:])
        return self._cascade.attend(folded, k_cache, v_cache, page_table, self._rows, scale).view_as(q)
