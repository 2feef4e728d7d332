"""Invariants I3 and I4: position follows depth, slot follows node index, and the two shifts cancel.

`TreeSpec` is where a window of chain positions becomes a tree's and back. Before the forward, `load_step`
moves row i from position vc + i to vc + depth[i]; after it, `compact_rows` moves the accepted path's rows to
the front and the positions back to vc + i, so that whatever comes next sees a chain. What the one adds it leaves
in a shift buffer, which the other takes away, so they cancel for any tree; a fresh spec holds the chain, for which
both do nothing.
KV slots never change here: node i's row stays the window's i-th slot.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.compact_window_rows import RowTable, compact_window_rows
from trtllm_tree.kernels.tree_ancestors import tree_ancestors
from trtllm_tree.tree.topology import chain_parents, mask_words
from trtllm_tree.tree.verify_batch import TreeVerifyBatch


class TreeSpec:
    """Fixed-address buffers of the verify trees of up to `max_batch` requests.

    Args:
        max_batch: rows of every buffer.
        num_nodes: N, root included.
        hidden: [max_batch * N, F] contiguous, the host's fixed buffer of the window's hidden rows; request b's
            node i is row b * N + i.
    """

    def __init__(self, max_batch: int, num_nodes: int, hidden: torch.Tensor) -> None:
        device = hidden.device
        self.num_nodes = num_nodes
        self.parent_buf = chain_parents(num_nodes, device).repeat(max_batch, 1)  # [max_batch, N]
        self.depth_buf = torch.empty(max_batch, num_nodes, dtype=torch.int32, device=device)
        self.mask_buf = torch.empty(
            max_batch, num_nodes, mask_words(num_nodes), dtype=torch.int64, device=device
        )  # [max_batch, N, words]
        self.shift_buf = torch.zeros(max_batch, num_nodes, dtype=torch.int64, device=device)  # depth - index
        tree_ancestors(self.parent_buf, depths=self.depth_buf, ancestor_mask=self.mask_buf)
        self._hidden_rows = torch.arange(max_batch * num_nodes, dtype=torch.int32, device=device)
        self._hidden_rows = self._hidden_rows.view(max_batch, num_nodes)
        self._hidden_table = RowTable.build([[hidden.view(hidden.shape[0], 1, 1, hidden.shape[1])]])

    def load_step(
        self, parent_map: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> TreeVerifyBatch:
        """Read this step's trees and shift `positions` [B, N] in place from vc + i to vc + depth[i].

        Args:
            parent_map: int32 [num_slots, N], the parents that the drafter left for each pool slot.
            slots: int64 [B], the pool slot of each request.
            positions: int32 or int64 [B, N], changed in place.
        """
        batch = slots.shape[0]
        parents, depths, mask = self.parent_buf[:batch], self.depth_buf[:batch], self.mask_buf[:batch]
        tree_ancestors(
            parent_map,
            depths=depths,
            ancestor_mask=mask,
            slots=slots,
            loaded_parents=parents,
            positions=positions,
            shift=self.shift_buf[:batch],
        )
        return TreeVerifyBatch(parents=parents, depths=depths, ancestor_mask=mask)

    def compact_rows(self, path: torch.Tensor, positions: torch.Tensor, *, max_depth: int) -> None:
        """Move the accepted path's hidden rows to the front and shift positions back, both in place.

        Args:
            path: int32 [B, N], accepted path, -1 padded.
            positions: integer [B, N], from vc + depth[i] back to vc + i.
            max_depth: longest possible path; later columns of `path` are -1.
        """
        batch = path.shape[0]
        compact_window_rows(self._hidden_table, self._hidden_rows[None, :batch], path, max_depth=max_depth)
        positions.sub_(self.shift_buf[:batch])
