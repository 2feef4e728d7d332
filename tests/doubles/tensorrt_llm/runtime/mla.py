"""Latent attention: projections of transformers' DeepSeek layers around two `TrtllmAttention`s.

Context rows attend through expanded heads, generation rows through the latent rows. Both calls get the rows of their
phase only. RoPE turns neighbouring channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import MLAParams, PositionalEmbeddingParams, TrtllmAttention
from .forward_args import AttentionForwardArgs, AttentionInputType
from .model_parts import ModelConfig
from .rope import RopeParams


class MLA(nn.Module):
    """One layer's latent attention; `source` is the layer of transformers that owns the weights."""

    def __init__(self, model_config: ModelConfig, layer_idx: int, source: nn.Module) -> None:
        super().__init__()
        config = model_config.pretrained_config
        self.source, self.layer_idx = source, layer_idx
        self.num_heads = config.num_attention_heads
        self.kv_lora_rank, self.v_head_dim = config.kv_lora_rank, config.v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        rope = RopeParams.from_config(config)
        rope.dim = self.qk_rope_head_dim
        params = MLAParams(
            config.q_lora_rank,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            self.qk_nope_head_dim,
            self.v_head_dim,
        )
        shared: dict[str, Any] = {
            "pos_embd_params": PositionalEmbeddingParams(rope, is_neox=False),
            "mla_params": params,
            "quant_config": model_config.cache_quant(),
        }
        self.mha = TrtllmAttention(layer_idx, self.num_heads, self.qk_head_dim, self.num_heads, **shared)
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        self.mqa = TrtllmAttention(layer_idx, self.num_heads, latent, 1, **shared)

    def forward(self, position_ids: Tensor, hidden_states: Tensor, attn_metadata: Any) -> Tensor:
        source = self.source
        if source.q_lora_rank is None:
            q = source.q_proj(hidden_states)
        else:
            q = source.q_b_proj(source.q_a_layernorm(source.q_a_proj(hidden_states)))
        latent, k_pe = source.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        latent_cache = torch.cat((source.kv_a_layernorm(latent), k_pe), dim=-1)
        split = attn_metadata.num_ctx_tokens
        output = q.new_empty(q.shape[0], self.num_heads * self.v_head_dim)
        if attn_metadata.num_contexts > 0:
            output[:split] = self._context(q[:split], latent_cache[:split], attn_metadata)
        if attn_metadata.num_generations > 0:
            output[split:] = self._generation(q[split:], latent_cache[split:], attn_metadata)
        return source.o_proj(output)

    def _context(self, q: Tensor, latent_cache: Tensor, attn_metadata: Any) -> Tensor:
        expanded = self.source.kv_b_proj(latent_cache[:, : self.kv_lora_rank])
        k_nope, v = expanded.view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim).split(
            [self.qk_nope_head_dim, self.v_head_dim], dim=-1
        )
        # The library fills in the rotated channels from the latent rows.
        k = torch.cat((k_nope, k_nope.new_zeros(*k_nope.shape[:2], self.qk_rope_head_dim)), dim=-1)
        args = AttentionForwardArgs(
            attention_input_type=AttentionInputType.context_only, latent_cache=latent_cache
        )
        return self.mha.forward(q, k.flatten(1), v.flatten(1), attn_metadata, forward_args=args)

    def _generation(self, q: Tensor, latent_cache: Tensor, attn_metadata: Any) -> Tensor:
        weight = self.source.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        to_latent, from_latent = weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        q_nope, q_pe = q.view(-1, self.num_heads, self.qk_head_dim).split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1
        )
        fused_q = q.new_full((*q_nope.shape[:2], self.kv_lora_rank + self.qk_rope_head_dim), float("nan"))
        fused_q[..., : self.kv_lora_rank] = torch.einsum("thn,hnl->thl", q_nope, to_latent)
        # Scheduler buffers and FP8 scales, which only the compiled kernels look at.
        scratch: tuple[Any, ...] = (None,) * 6
        self.mqa.mla_rope_generation(fused_q, q_pe, latent_cache, attn_metadata, *scratch)
        args = AttentionForwardArgs(
            attention_input_type=AttentionInputType.generation_only, latent_cache=latent_cache, q_pe=q_pe
        )
        attended = self.mqa.forward(fused_q.flatten(1), None, None, attn_metadata, forward_args=args)
        attended = attended.view(-1, self.num_heads, self.kv_lora_rank)
        return torch.einsum("thl,hvl->thv", attended, from_latent).flatten(1)
