"""Invariant I5: one tree attention. The leaf's decode for the prefix, one small kernel for the tree.

Every row of a request sees the whole prefix; the ancestor mask concerns only the W keys behind it. So the
leaf attends the prefix (where the time goes at long context), and `tree_window_attention` attends what is
left of each row and merges both by their log-sum-exp. Verify runs it with R = W = N; draft lanes with
R = K rows over their (S - 1) * K window. A leaf that can mask the window itself does all of it in one pass.
Which of the two is the leaf's property: there is no second path for any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_tree.attention.base import AttentionLeaf
from trtllm_tree.kernels.tree_window_attention import tree_window_attention


@dataclass(frozen=True)
class TreeCascadeRows:
    """The rows of one tree forward.

    Attributes:
        prefix_lens: int32 [B], keys that every row sees (P).
        mask: int64 [B, R, words], bit j of row r: window key at position P + j is seen.
        window: W, keys that the mask speaks of.
        max_prefix_len: host-side bound of `prefix_lens`.
    """

    prefix_lens: torch.Tensor
    mask: torch.Tensor
    window: int
    max_prefix_len: int


class TreeCascade:
    """Tree attention over one leaf."""

    def __init__(self, leaf: AttentionLeaf) -> None:
        self.leaf = leaf

    def plan(self, page_table: torch.Tensor, rows: TreeCascadeRows, scale: float) -> None:
        """Prepare all layers of one forward; needed, once and outside graphs, by leaves that are not graph-safe."""
        self.leaf.plan(page_table, rows.prefix_lens, num_rows=rows.mask.shape[1], scale=scale)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        rows: TreeCascadeRows,
        scale: float,
    ) -> torch.Tensor:
        """Attend q [B, R, Hq, D] over prefix and masked window; returns [B, R, Hq, D].

        The window's K/V must be in the cache. `k_cache`, `v_cache` are [num_pages, Hkv, page_size, D] and
        `page_table` int32 [B, max_pages]. `v_cache=None` means MLA: `k_cache` holds latent rows, `q` is the
        absorbed query, and the result [B, R, Hq, Dv] has the value channels that the leaf knows of.
        """
        if self.leaf.one_pass:
            return self.leaf.tree_decode(
                q,
                k_cache,
                v_cache,
                page_table,
                rows.prefix_lens,
                rows.mask,
                window=rows.window,
                scale=scale,
            )
        prefix_out, prefix_lse2 = self.leaf.prefix_decode(
            q,
            k_cache,
            v_cache,
            page_table,
            rows.prefix_lens,
            max_prefix_len=rows.max_prefix_len,
            scale=scale,
        )
        return tree_window_attention(
            q,
            k_cache,
            v_cache,
            page_table,
            rows.prefix_lens,
            rows.mask,
            prefix_out,
            prefix_lse2,
            window=rows.window,
            causal_prefix=self.leaf.causal_prefix,
            scale=scale,
        )
