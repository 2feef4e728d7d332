"""Causal attention for the engine's own rows: prefill segments, and equal numbers of decode rows a request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_tree.engine.ports import Segment
from trtllm_tree.kernels.prefix_attention import prefix_attention


class PrefillAttention:
    """Rows of several prompts behind one another, each request seeing its own keys up to its own row."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self._segments = [
            (segment, torch.tensor([segment.end], dtype=torch.int32, device=device)) for segment in segments
        ]

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`; `page_table` has one row a segment."""
        out = torch.empty_like(q)
        for index, (segment, kv_len) in enumerate(self._segments):
            rows = slice(segment.row, segment.row + segment.length)
            part, _ = prefix_attention(
                q[rows].unsqueeze(0),
                k_cache,
                v_cache,
                page_table[index : index + 1],
                kv_len,
                causal=True,
                max_kv_len=segment.end,
                scale=scale,
            )
            out[rows] = part[0]
        return out


class TorchDecodeAttention:
    """`DecodeAttentionFactory` in torch: gathers as many pages as the longest request has."""

    graph_safe = False

    def __call__(self, kv_lens: torch.Tensor, num_rows: int, max_kv_len: int) -> DecodeAttention:
        """See `engine.ports.DecodeAttentionFactory`."""
        return DecodeAttention(kv_lens, num_rows, max_kv_len)


class DecodeAttention:
    """R consecutive rows a request, each seeing every key up to its own.

    Args:
        kv_lens: int32 [B], keys including those of the rows.
        num_rows: R.
        max_kv_len: host-side bound of `kv_lens`.
    """

    def __init__(self, kv_lens: torch.Tensor, num_rows: int, max_kv_len: int) -> None:
        self._kv_lens, self._num_rows, self._max_kv_len = kv_lens, num_rows, max_kv_len

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        folded = q.view(-1, self._num_rows, *q.shape[1:])
        out, _ = prefix_attention(
            folded,
            k_cache,
            v_cache,
            page_table,
            self._kv_lens,
            causal=True,
            max_kv_len=self._max_kv_len,
            scale=scale,
        )
        return out.view_as(q)
