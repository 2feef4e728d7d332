"""What an attention leaf is: a prefix partial with its log-sum-exp or a whole pass, and an answer about trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from trtllm_tree.support.report import TreeSupport


class AttentionLeaf(ABC):
    """A backend that attends over a paged cache and knows nothing of trees.

    With `one_pass` it attends prefix and masked window together and gives `tree_decode`; without, it gives
    the prefix partial, `prefix_decode`.
    `causal_prefix` says which prefix partial its `prefix_decode` gives: True when row r covers keys
    [0, P - R + 1 + r), False when every row covers [0, P). Neither ever depends on a size.
    """

    name: str
    one_pass: bool = False
    causal_prefix: bool = False

    def prefix_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        *,
        max_prefix_len: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend q [B, R, Hq, D] over the first keys of each request.

        Returns:
            out [B, R, Hq, D] and lse2 float32 [B, R, Hq]. A row that covers no key may hold anything.
        """
        raise NotImplementedError(f"{self.name} gives no prefix partial")

    def tree_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
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
