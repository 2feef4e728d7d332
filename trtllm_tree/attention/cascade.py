"""Invariant I5: one tree attention. The leaf's decode for the prefix, one small kernel for the tree.

Every row of a request sees the whole prefix; the ancestor mask concerns only the W keys behind it. So the
leaf attends the prefix (where the time goes at long context), and `tree_window_attention` attends what is
left of each row and merges both by their log-sum-exp. Verify runs it with R = W = N; draft lanes with
R = K rows over their (S - 1) * K window. A leaf that can mask the window itself does all of it in one pass.
Which of the two is the leaf's property: there is no second path for any size.

Two options belong to single layers and come with each call. A sliding window cuts what a row sees by position
(`attention.sliding`), and attention sinks join the merge, once. A leaf that cannot do one refuses the call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trtllm_tree.attention.base import AttentionLeaf
from trtllm_tree.attention.sliding import SlidingRows, slide
from trtllm_tree.errors import Problem, UnsupportedError
from trtllm_tree.kernels.tree_window_attention import tree_window_attention


@dataclass(frozen=True)
class TreeCascadeRows:
    """The rows of one tree forward.

    Attributes:
        prefix_lens: int32 [B], keys that every row sees (P).
        mask: int64 [B, R, words], bit j of row r: window key at position P + j is seen.
        window: W, keys that the mask speaks of.
        max_prefix_len: host-side bound of `prefix_lens`.
        row_depths: int32 [B or 1, R], the rows' positions less P; needed where a layer slides.
        column_depths: int32 [B or 1, W], the window columns' positions less P; needed where a layer slides.
        row_page_table: int32 [B, R, max_pages], given where a row finds the prefix through pages of its own: each row
            then decodes the prefix alone, as a query at the prefix's last key would. A sliding window is so frozen at
            the prefix's end, the same S keys for every row, and cuts nothing of the window behind it (draft lanes).
    """

    prefix_lens: torch.Tensor
    mask: torch.Tensor
    window: int
    max_prefix_len: int
    row_depths: torch.Tensor | None = None
    column_depths: torch.Tensor | None = None
    row_page_table: torch.Tensor | None = None
    _slid: dict[int, SlidingRows] = field(default_factory=dict, init=False, repr=False, compare=False)

    def slid(self, sliding_window: int) -> SlidingRows:
        """What `sliding_window` leaves of these rows, derived by the first layer of the forward that asks."""
        if sliding_window not in self._slid:
            assert self.row_depths is not None, "a layer slides over rows without depths"
            assert self.column_depths is not None, "a layer slides over columns without depths"
            self._slid[sliding_window] = slide(
                self.prefix_lens, self.mask, self.row_depths, self.column_depths, sliding_window
            )
        return self._slid[sliding_window]


class TreeCascade:
    """Tree attention over one leaf."""

    def __init__(self, leaf: AttentionLeaf) -> None:
        self.leaf = leaf

    def plan(self, page_table: torch.Tensor, rows: TreeCascadeRows, scale: float) -> None:
        """Prepare all layers of one forward; needed, once and outside graphs, by leaves that are not graph-safe."""
        num_rows = rows.mask.shape[1]
        if rows.row_page_table is None:
            self.leaf.plan(page_table, rows.prefix_lens, num_rows=num_rows, scale=scale)
            return
        lens = rows.prefix_lens.repeat_interleave(num_rows)
        self.leaf.plan(rows.row_page_table.flatten(0, 1), lens, num_rows=1, scale=scale)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        rows: TreeCascadeRows,
        scale: float,
        *,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend q [B, R, Hq, D] over prefix and masked window; returns [B, R, Hq, D].

        The window's K/V must be in the cache. `k_cache`, `v_cache` are [num_pages, Hkv, page_size, D] and
        `page_table` int32 [B, max_pages]. `v_cache=None` means MLA: `k_cache` holds latent rows, `q` is the
        absorbed query, and the result [B, R, Hq, Dv] has the value channels that the leaf knows of.

        Args:
            sliding_window: S, a row at position p sees keys above p - S only; None for all.
            sinks: float32 [Hq], natural logarithms: what a head's sink adds to the sum of its softmax.

        Raises:
            UnsupportedError: the leaf cannot do what this layer asks for.
        """
        self._refuse_options(rows, sliding_window, sinks)
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
        mask, causal_prefix = rows.mask, self.leaf.causal_prefix
        if rows.row_page_table is not None:
            partial = self._partial_of_each_row(q, k_cache, v_cache, rows, scale, sliding_window)
            causal_prefix = False
        elif sliding_window is not None:
            partial = self._sliding_partial(q, k_cache, v_cache, page_table, rows, scale, sliding_window)
            mask, causal_prefix = rows.slid(sliding_window).mask, False
        else:
            partial = self.leaf.prefix_decode(
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
            mask,
            *partial,
            window=rows.window,
            causal_prefix=causal_prefix,
            scale=scale,
            sinks=sinks,
        )

    def _sliding_partial(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        rows: TreeCascadeRows,
        scale: float,
        sliding_window: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The partial of rows that see the prefix from a key of their own on."""
        slid = rows.slid(sliding_window)
        out, lse2 = self.leaf.sliding_prefix_decode(
            q,
            k_cache,
            v_cache,
            page_table,
            rows.prefix_lens,
            slid.first_keys,
            max_prefix_len=rows.max_prefix_len,
            scale=scale,
        )
        # The merge tells by the prefix's length which rows have a partial; these have none all the same.
        empty = slid.empty.unsqueeze(2)
        return out.masked_fill(empty.unsqueeze(3), 0.0), lse2.masked_fill(empty, -torch.inf)

    def _partial_of_each_row(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        rows: TreeCascadeRows,
        scale: float,
        sliding_window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The partial of B * R requests of one row each: a causal one and a full one are then the same."""
        assert rows.row_page_table is not None, "rows have no page tables of their own"
        num_rows, bound = q.shape[1], rows.max_prefix_len
        lens = rows.prefix_lens.repeat_interleave(num_rows)
        args = (q.flatten(0, 1).unsqueeze(1), k_cache, v_cache, rows.row_page_table.flatten(0, 1), lens)
        if sliding_window is None:
            out, lse2 = self.leaf.prefix_decode(*args, max_prefix_len=bound, scale=scale)
        else:
            first_keys = (lens - sliding_window).clamp(min=0).unsqueeze(1)
            out, lse2 = self.leaf.sliding_prefix_decode(*args, first_keys, max_prefix_len=bound, scale=scale)
        return out.view(*q.shape[:3], -1), lse2.view(q.shape[:3])

    def _refuse_options(
        self, rows: TreeCascadeRows, sliding_window: int | None, sinks: torch.Tensor | None
    ) -> None:
        """Name the options of this layer that the leaf cannot honour."""
        leaf = self.leaf
        asked = (
            ("sliding_window", sliding_window, leaf.supports_sliding_window, "a sliding window"),
            ("sinks", None if sinks is None else "given", leaf.supports_sinks, "attention sinks"),
            (
                "row_page_table",
                None if rows.row_page_table is None else "given",
                not leaf.one_pass,
                "pages by row",
            ),
        )
        problems = [
            Problem(
                f"attention layer: {option}",
                value,
                f"attention leaf {leaf.name} cannot serve {what}",
                "Use the reference leaf for this model.",
            )
            for option, value, supported, what in asked
            if value is not None and not supported
        ]
        if problems:
            raise UnsupportedError(problems)
