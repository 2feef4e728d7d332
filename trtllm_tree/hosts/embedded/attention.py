"""The cascade as the engine's decode attention: consecutive rows are a chain."""

from __future__ import annotations

import torch

from trtllm_tree.attention.cascade import TreeCascade
from trtllm_tree.attention.rows import ChainRows, TreeAttention


class CascadeDecodeAttention:
    """`engine.ports.DecodeAttentionFactory` over a one-pass leaf.

    Args:
        cascade: over a leaf that looks at no host-side length.
        device: where the masks live.
    """

    graph_safe = True

    def __init__(self, cascade: TreeCascade, device: torch.device) -> None:
        assert cascade.leaf.one_pass, "a leaf that needs host-side bounds cannot be captured"
        self._cascade, self._chains = cascade, ChainRows(device)

    def __call__(self, kv_lens: torch.Tensor, num_rows: int, max_kv_len: int) -> TreeAttention:
        """See `engine.ports.DecodeAttentionFactory`."""
        return TreeAttention(self._cascade, self._chains.behind(kv_lens - num_rows, num_rows, max_kv_len))
