"""What an attention leaf is: a prefix partial with its log-sum-exp or a whole pass, and an answer about trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_tree.support.report import TreeSupport


@dataclass(frozen=True, kw_only=True)
class LeafShape:
    """What a leaf will be called with: enough to answer for it, and to size buffers of fixed address.

    Attributes:
        num_heads: Hq.
        num_kv_heads: Hkv; 1 for a latent cache.
        head_dim: D; for a latent cache Dqk, its rotary channels included.
        page_size: slots of a page.
        dtype: of queries and outputs.
        kv_dtype: of the cache.
        value_dim: Dv, leading channels of a latent row that are its value (MLA); None where keys and values
            are separate (GQA).
        sliding_window: whether any layer slides.
        sinks: whether any layer has attention sinks.
        max_batch: largest B.
        max_rows: largest R.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    value_dim: int | None = None
    sliding_window: bool = False
    sinks: bool = False
    max_batch: int = 64
    max_rows: int = 64


class AttentionLeaf(ABC):
    """A backend that attends over a paged cache and knows nothing of trees.

    With `one_pass` it attends prefix and masked window together and gives `tree_decode`; without, it gives
    the prefix partial, `prefix_decode`.
    `causal_prefix` says which prefix partial its `prefix_decode` gives: True when row r covers keys
    [0, P - R + 1 + r), False when every row covers [0, P). Neither ever depends on a size.
    `graph_safe` is False for a leaf whose `plan` reads lengths on the host.
    `supports_sliding_window` and `supports_sinks` answer for what single layers may ask of it.
    """

    name: str
    one_pass: bool = False
    causal_prefix: bool = False
    graph_safe: bool = True
    supports_sliding_window: bool = False
    supports_sinks: bool = False

    def plan(  # noqa: B027
        self, page_table: torch.Tensor, prefix_lens: torch.Tensor, *, num_rows: int, scale: float
    ) -> None:
        """Prepare all layers of one forward with R = `num_rows`; most leaves need no such step."""

    def prefix_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        *,
        max_prefix_len: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend q [B, R, Hq, D] over the first keys of each request.

        Args:
            k_cache: [num_pages, Hkv, page_size, D]; for MLA the latent cache, and q the absorbed query.
            v_cache: as `k_cache`; None for MLA.
            page_table: int32 [B, max_pages]; an entry < 0 means page 0.
            prefix_lens: int32 [B], P; 0 is allowed.
            max_prefix_len: host-side bound of `prefix_lens`.
            scale: factor of the scores.

        Returns:
            out [B, R, Hq, Dv], Dv = D but for MLA, and lse2 float32 [B, R, Hq]. A row that covers no key may
            hold anything.
        """
        raise NotImplementedError(f"{self.name} gives no prefix partial")

    def sliding_prefix_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        first_keys: torch.Tensor,
        *,
        max_prefix_len: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`prefix_decode` of a layer that slides: row r covers [first_keys[r], P), whatever `causal_prefix` says.

        `first_keys` is int32 [B, R]. Leaves with `supports_sliding_window` have it.
        """
        raise NotImplementedError(f"{self.name} has no sliding window")

    def tree_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        mask: torch.Tensor,
        *,
        window: int,
        scale: float,
    ) -> torch.Tensor:
        """Attend q [B, R, Hq, D] over each request's prefix and, by `mask`, its window.

        Returns:
            out [B, R, Hq, D].
        """
        raise NotImplementedError(f"{self.name} does not attend in one pass")

    @abstractmethod
    def tree_support(self) -> TreeSupport:
        """Whether this leaf can serve verify and lanes."""

    def child_backends(self) -> Sequence[AttentionLeaf]:
        """The backends a composite routes to; a leaf has none."""
        return ()
