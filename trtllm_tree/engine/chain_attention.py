"""Causal attention for the engine's own rows: prefill segments, and equal numbers of decode rows a request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trtllm_tree.engine.ports import Segment
from trtllm_tree.kernels.prefix_attention import prefix_attention


class _FirstKeys:
    """Where consecutive rows' sliding windows begin, derived once a forward.

    Args:
        kv_lens: int32 [B], keys including those of the rows.
        num_rows: R.
    """

    def __init__(self, kv_lens: torch.Tensor, num_rows: int) -> None:
        self._kv_lens, self._num_rows = kv_lens, num_rows
        self._found: dict[int, torch.Tensor] = {}

    def of(self, sliding_window: int | None) -> torch.Tensor | None:
        """int32 [B, R]: row r, at position p = kv_len - R + r, sees keys from max(0, p - sliding_window + 1) on."""
        if sliding_window is None:
            return None
        if sliding_window not in self._found:
            row = torch.arange(self._num_rows, dtype=torch.int32, device=self._kv_lens.device)
            position = self._kv_lens.unsqueeze(1) - self._num_rows + row
            self._found[sliding_window] = (position - sliding_window + 1).clamp(min=0)
        return self._found[sliding_window]


def _join_sinks(out: torch.Tensor, lse2: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """`out` [B, R, Hq, D] once `sinks` [Hq] are part of the softmax whose log-sum-exp is `lse2` [B, R, Hq]."""
    if sinks is None:
        return out
    # e^lse / (e^lse + e^sink)
    share = torch.sigmoid(lse2 * math.log(2.0) - sinks)
    return (out.float() * share.unsqueeze(3)).to(out.dtype)


class PrefillAttention:
    """Rows of several prompts behind one another, each request seeing its own keys up to its own row."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        lens = [torch.tensor([segment.end], dtype=torch.int32, device=device) for segment in segments]
        first_keys = [_FirstKeys(n, segment.length) for n, segment in zip(lens, segments, strict=True)]
        self._segments = list(zip(segments, lens, first_keys, strict=True))

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
        """See `AttentionBackend.attend`; `page_table` has one row a segment."""
        out = q.new_empty(*q.shape[:2], value_dim or q.shape[2])
        for index, (segment, kv_len, first_keys) in enumerate(self._segments):
            rows = slice(segment.row, segment.row + segment.length)
            part, lse2 = prefix_attention(
                q[rows].unsqueeze(0),
                k_cache,
                v_cache,
                page_table[index : index + 1],
                kv_len,
                causal=True,
                max_kv_len=segment.end,
                scale=scale,
                value_dim=value_dim,
                first_keys=first_keys.of(sliding_window),
            )
            out[rows] = _join_sinks(part, lse2, sinks)[0]
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
        self._first_keys = _FirstKeys(kv_lens, num_rows)

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
        """See `AttentionBackend.attend`."""
        folded = q.view(-1, self._num_rows, *q.shape[1:])
        out, lse2 = prefix_attention(
            folded,
            k_cache,
            v_cache,
            page_table,
            self._kv_lens,
            causal=True,
            max_kv_len=self._max_kv_len,
            scale=scale,
            value_dim=value_dim,
            first_keys=self._first_keys.of(sliding_window),
        )
        return _join_sinks(out, lse2, sinks).flatten(0, 1)
