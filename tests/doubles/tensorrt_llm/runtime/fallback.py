"""The double's own library: plain torch, causal rows over gathered keys. It knows no trees.

Rotates where the layer's RoPE is fused, writes K/V at the rows' places, and attends. Lengths are the device's, so
that a captured call can be replayed; the host only bounds how many keys are gathered.
"""

from __future__ import annotations

from typing import Any

import torch

from .fmha import Fmha, PhasedFmha
from .latent import run_latent_context, run_latent_generation
from .layout import NEW
from .rope import rotate
from .rows import LayerRows, key_bound, rows_of


class _CausalRows(PhasedFmha):
    """Any rows that follow each other."""

    def run_context(self, params):
        self._run(params)

    def run_generation(self, params):
        meta = params.meta
        if meta.use_spec_decoding and meta.is_spec_dec_tree and params.input_seq_length > 1:
            step = getattr(meta, "trtllm_tree_step", None)
            assert step is None, "rows of a tree reached the library that knows no trees"
        self._run(params)

    def run_mla_context(self, params):
        run_latent_context(params)

    def run_mla_generation(self, params):
        run_latent_generation(params)

    def _run(self, params: Any) -> None:
        attn, meta = params.attn, params.meta
        qkv = params.qkv_or_q if NEW else params.qkv_input
        output = params.output if NEW else params.context_buf
        first, count = params.seq_offset, params.num_requests
        request, positions = rows_of(params)
        dims = (attn.num_heads, attn.num_kv_heads, attn.num_kv_heads)
        q, k, v = (part.unflatten(-1, (-1, attn.head_dim)) for part in
                   qkv.split([heads * attn.head_dim for heads in dims], dim=-1))  # fmt: skip
        if attn.rope_params.dim > 0:
            q, k = (rotate(x, positions, attn.rotary_cos_sin, attn.rope_params.dim) for x in (q, k))
        cache = LayerRows(attn, meta)
        cache.write(request, positions, k, v)
        longest = key_bound(meta, first, count)
        owner = request - first
        keys, values = cache.read(first, count, longest, q.dtype)
        groups = attn.num_heads // attn.num_kv_heads
        at = torch.arange(longest, device=q.device)
        scale = 1.0 / (attn.head_dim**0.5 * attn.q_scaling)
        scores = (
            torch.einsum("thd,tshd->ths", q.float(), keys[owner].repeat_interleave(groups, 2).float()) * scale
        )
        scores.masked_fill_((at > positions[:, None])[:, None], float("-inf"))
        weights = scores.softmax(-1)
        # Poison behind a row's keys must not count, not even times zero.
        seen = values[owner].repeat_interleave(groups, 2).float()
        seen = seen.masked_fill((at > positions[:, None])[..., None, None], 0.0)
        output.copy_(torch.einsum("ths,tshd->thd", weights, seen))


if NEW:

    class FallbackFmha(_CausalRows):
        """Split by phase, as the newest one is."""

else:

    class FallbackFmha(Fmha):  # type: ignore[no-redef]
        """Takes whole calls: nothing can be put in the place of one of its phases."""

        def __init__(self, attn=None):
            super().__init__(attn)
            self._rows = _CausalRows(attn)

        def forward(self, q, k, v, metadata, forward_args):
            self._rows.forward(q, k, v, metadata, forward_args)
