"""What the core asks of the runtime under it (the host). Both hosts fill these, in files of the same names.

Tensors have fixed addresses over a request batch's life where the host captures CUDA graphs. B is the number
of decode rows of this step, pad rows included; a pad row uses the dummy pool slot, whose page table is all
dummy pages and whose committed length is 0, so it stays inert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trtllm_tree.tree.lanes import TreeDraftInputs


@dataclass(frozen=True)
class RoundBatch:
    """The requests of one round.

    Attributes:
        slots: int64 [B], pool slots.
        committed_lens: int32 [B], tokens in the cache before the round (vc).
        write_slots: int32 [G, B, N], per target cache group the KV slot of vc + i; G is 0 where only the
            draft model runs.
        draft_page_table: int32 [B, max_pages] of the draft cache.
        draft_page_size: KV rows of a draft page.
        max_committed_len: host-side bound of `committed_lens`.
    """

    slots: torch.Tensor
    committed_lens: torch.Tensor
    write_slots: torch.Tensor
    draft_page_table: torch.Tensor
    draft_page_size: int
    max_committed_len: int


class KVPool(Protocol):
    """The target's paged KV cache, as far as compaction needs it."""

    def group_regions(self) -> Sequence[Sequence[torch.Tensor]]:
        """Per cache group, the K and V views [num_pages, Hkv, page_size, D] of its attention layers."""
        ...


class DraftModel(Protocol):
    """The draft model over the host's draft cache. Every call writes the rows' K/V, then attends."""

    hidden_size: int
    dtype: torch.dtype
    d2t: torch.Tensor | None

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Target features [..., F] to draft hidden rows [..., H]."""
        ...

    def chain_rows(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: RoundBatch,
        last_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows [B, R] at consecutive positions int64 [B, R], each seeing every key up to its own.

        `token_ids` int32 [B, R], `hidden` [B, R, H]. Returns [B, R, H]; given `last_rows` int64 [B], b * R + i for
        row i of request b, only these rows, [B, 1, H]: the others' K/V are all that is wanted of them.
        """
        ...

    def lane_rows(
        self,
        step: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        lanes: TreeDraftInputs,
        batch: RoundBatch,
    ) -> torch.Tensor:
        """Lane rows of `step` 1 .. S-1: `token_ids` int32 [B, K], `hidden` [B, K, H]; returns [B, K, H]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden rows [M, H] to draft logits [M, Vd]."""
        ...
