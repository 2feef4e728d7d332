"""Latent attention in plain torch: what the double's library does, and what TensorRT-LLM's RoPE op does before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layout import NEW
from .rope import rotate_pairs
from .rows import LayerRows, key_bound, rows_of


def write_latent(
    attn: Any,
    meta: Any,
    request: Tensor,
    places: Tensor,
    latent_cache: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """Rotate the rows' last channels and put them into the cache; returns the rotated rows [T, rank + rope].

    Args:
        positions: of the rotation, where they are not the places.
    """
    rank = attn.mla_params.kv_lora_rank
    turns = places if positions is None else positions
    tail = rotate_pairs(latent_cache[:, None, rank:], turns, attn.rotary_cos_sin)[:, 0]
    rows = torch.cat((latent_cache[:, :rank], tail), dim=-1)
    LayerRows(attn, meta).write(request, places, rows[:, None], None)
    return rows


def run_latent_context(params: Any) -> None:
    """Whole prompts, through expanded heads."""
    assert params.meta.helix_position_offsets is None, "the real one would rotate context rows by these"
    attn, fwd = params.attn, params.fwd
    q, k, v, output = _tensors(params)
    request, positions = rows_of(params)
    latent = write_latent(attn, params.meta, request, positions, fwd.latent_cache)
    nope = attn.mla_params.qk_nope_head_dim
    q, k, v = (rows.unflatten(-1, (attn.num_heads, -1)) for rows in (q, k, v))
    q = torch.cat((q[..., :nope], rotate_pairs(q[..., nope:], positions, attn.rotary_cos_sin)), dim=-1)
    shared = latent[:, None, attn.mla_params.kv_lora_rank :].expand(-1, attn.num_heads, -1)
    k = torch.cat((k[..., :nope], shared), dim=-1)
    seen = (request[:, None] == request) & (positions <= positions[:, None])
    scores = torch.einsum("thd,shd->hts", q.float(), k.float()) * _scale(attn)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    output.copy_(torch.einsum("hts,shd->thd", weights, v.float()))


def run_latent_generation(params: Any) -> None:
    """Rows that follow each other, over latent rows; queries and rows were rotated before."""
    attn, meta = params.attn, params.meta
    if meta.use_spec_decoding and meta.is_spec_dec_tree and params.input_seq_length > 1:
        step = getattr(meta, "trtllm_tree_step", None)
        assert step is None, "rows of a tree reached the library that knows no trees"
    q, _, _, output = _tensors(params)
    request, positions = rows_of(params)
    first, count = params.seq_offset, params.num_requests
    longest = key_bound(meta, first, count)
    (latent,) = LayerRows(attn, meta).read(first, count, longest, torch.float32)
    hidden = torch.arange(longest, device=q.device) > positions[:, None]
    # Poison behind a row's keys must not count, not even times zero.
    rows = latent[request - first, :, 0].masked_fill(hidden[..., None], 0.0)
    scores = torch.einsum("thd,tsd->ths", q.unflatten(-1, (attn.num_heads, -1)).float(), rows) * _scale(attn)
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    output.copy_(torch.einsum("ths,tsd->thd", weights, rows[..., : attn.mla_params.kv_lora_rank]))


def _scale(attn: Any) -> float:
    """Of the expanded heads, also for latent rows."""
    channels = attn.mla_params.qk_nope_head_dim + attn.mla_params.qk_rope_head_dim
    return 1.0 / (channels**0.5 * attn.q_scaling)


def _tensors(params: Any) -> tuple[Any, Any, Any, Tensor]:
    if NEW:
        return params.qkv_or_q, params.k, params.v, params.output
    return params.qkv_input, params.key_input, params.value_input, params.context_buf
