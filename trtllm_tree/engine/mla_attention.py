"""Multi-head latent attention (MLA) over the paged latent cache, in the absorbed form.

DeepSeek-V3's attention expands a latent row c into every head's key and value by `kv_b_proj` = [W_UK; W_UV]. Since
q . (W_UK c) = (q W_UK) . c, and the weighted sum of values is W_UV times the weighted sum of latents, the heads can
share one cached row [c, rotated k_pe] instead, and nothing is expanded. The projections are transformers' own modules.
Must not know trees, or who attends.

Maths: DeepSeek-V2 (DeepSeek-AI, 2024), section 2.1 and appendix C.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from trtllm_tree.config.model_rules import (
    LATENT_MODELS,
    LATENT_RULE,
    QUANTISED_LATENT_RULE,
    UNQUANTISED_REMEDY,
)
from trtllm_tree.engine.kv_cache import KVCache, LayerSpec
from trtllm_tree.engine.ports import ForwardBatch
from trtllm_tree.errors import Problem


def latent_layer_spec(config: Any) -> LayerSpec:
    """Cache shape of a layer of `config`, which has a `kv_lora_rank`."""
    rank = config.kv_lora_rank
    return LayerSpec(num_kv_heads=1, head_dim=rank + config.qk_rope_head_dim, value_dim=rank)


def latent_problems(config: Any) -> list[Problem]:
    """Why the latent attention of a config with a `kv_lora_rank` cannot be absorbed."""
    problems = []
    if config.model_type not in LATENT_MODELS:
        problems.append(Problem("model: model_type", config.model_type, LATENT_RULE, "Use another model."))
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        option = "model: quantization_config"
        problems.append(Problem(option, method, QUANTISED_LATENT_RULE, UNQUANTISED_REMEDY))
    return problems


class LatentAttention(nn.Module):
    """Stands in for a decoder layer's `DeepseekV3Attention` and takes over its modules.

    Args:
        attention: the module that it replaces.
        layer: the cache's name for the layer.
    """

    def __init__(self, attention: DeepseekV3Attention, layer: str) -> None:
        super().__init__()
        assert type(attention) is DeepseekV3Attention, f"not known: {type(attention).__name__}"
        self.attention, self._layer = attention, layer
        self._rotate = (
            apply_rotary_pos_emb_interleave if attention.config.rope_interleave else apply_rotary_pos_emb
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *,
        paged_batch: ForwardBatch,
        paged_cache: KVCache,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend the rows hidden_states [1, T, H], whose latent rows are stored first; returns [1, T, H]."""
        own = self.attention
        rank, rope_dim, nope_dim = own.kv_lora_rank, own.qk_rope_head_dim, own.qk_nope_head_dim
        q_nope, q_rope = self._query(hidden_states).split([nope_dim, rope_dim], dim=-1)  # [1, Hq, T, ...]
        latent, k_rope = own.kv_a_proj_with_mqa(hidden_states).split([rank, rope_dim], dim=-1)
        latent = own.kv_a_layernorm(latent)  # [1, T, rank]
        q_rope, k_rope = self._rotate(q_rope, k_rope.unsqueeze(1), *position_embeddings)

        # Absorbed: [Hq, nope, rank] and [Hq, Dv, rank] views of one weight.
        w_uk, w_uv = own.kv_b_proj.weight.view(own.num_heads, -1, rank).split(
            [nope_dim, own.v_head_dim], dim=1
        )
        # Rotary channels come in the stream's float32; the cache holds the model's dtype.
        q = torch.cat([q_nope[0] @ w_uk, q_rope[0].to(latent.dtype)], dim=-1).transpose(0, 1)
        row = torch.cat([latent[0], k_rope[0, 0].to(latent.dtype)], dim=-1)  # [T, Dqk]

        group = paged_cache.layer(self._layer)[0]
        slots = paged_batch.write_slots[group]
        cache = paged_cache.write(self._layer, slots, row.unsqueeze(1), None)[0]
        out = paged_batch.attention.attend(
            q, cache, None, paged_batch.page_tables[group], own.scaling, value_dim=rank
        )  # [T, Hq, rank]
        values = out.transpose(0, 1) @ w_uv.transpose(1, 2)  # [Hq, T, Dv]
        return own.o_proj(values.transpose(0, 1).flatten(1)).unsqueeze(0), None

    def _query(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries [1, Hq, T, nope + rope] before rotation."""
        # Typed as modules or None, one or the other of which a config has.
        own: Any = self.attention
        is_direct = own.q_lora_rank is None
        q = own.q_proj(hidden) if is_direct else own.q_b_proj(own.q_a_layernorm(own.q_a_proj(hidden)))
        return q.unflatten(-1, (own.num_heads, own.qk_head_dim)).transpose(1, 2)
