"""Glm4Moe: grouped heads, experts behind the first layers, and an MTP layer that is a decoder layer of its kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import Attention, PositionalEmbeddingParams, QKNormRoPEAttention
from .layout import device
from .model_parts import GatedMLP, ModelConfig, RMSNorm, register_auto_model
from .models import SpecDecOneEngineForCausalLM
from .mtp import DeepseekV3MTPHead, without_mtp
from .rope import RopeParams


class Glm4Gate(nn.Module):
    """Sigmoid scores; the bias has a say in the choice, and none in the weights. One group of experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        assert config.n_group == 1, "groups of experts are not imitated"
        self.top_k, self.scale, self.norms = (
            config.num_experts_per_tok, config.routed_scaling_factor, config.norm_topk_prob,
        )  # fmt: skip
        size, place = config.n_routed_experts, {"dtype": torch.float32, "device": device()}
        self.weight = nn.Parameter(torch.zeros(size, config.hidden_size, **place))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(size, **place))

    def forward(self, x: Tensor) -> Tensor:
        """What each expert counts for, [T, experts]."""
        scores = (x.float() @ self.weight.T).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.norms:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter(-1, chosen, weights * self.scale)


class Glm4MoE(nn.Module):
    """Every expert on every row, as nobody would: nothing waits for the device."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        size = {"hidden_size": config.hidden_size, "dtype": dtype}
        inner = config.moe_intermediate_size
        self.gate = Glm4Gate(config)
        self.experts = nn.ModuleList(
            GatedMLP(intermediate_size=inner, **size) for _ in range(config.n_routed_experts)
        )
        self.shared_experts = GatedMLP(intermediate_size=inner * config.n_shared_experts, **size)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).to(x.dtype)
        out = self.shared_experts(x)
        for index, expert in enumerate(self.experts):
            out = out + shares[:, index : index + 1] * expert(x)
        return out


class Glm4DecoderLayer(nn.Module):
    def __init__(self, model_config: ModelConfig, layer_idx: int, aux_stream_dict: Any) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.layer_idx = layer_idx
        attention: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "bias": config.attention_bias,
            "dense_bias": False,
            "pos_embd_params": PositionalEmbeddingParams(RopeParams.from_config(config)),
            "layer_idx": layer_idx,
            "dtype": dtype,
            "config": model_config,
            "head_dim": getattr(config, "head_dim", None),
        }
        if config.use_qk_norm:
            self.self_attn: nn.Module = QKNormRoPEAttention(**attention, eps=config.rms_norm_eps)
        else:
            self.self_attn = Attention(**attention, rope_fusion=model_config.rope_fusion)
        if layer_idx >= config.first_k_dense_replace:
            self.mlp: nn.Module = Glm4MoE(model_config)
        else:
            self.mlp = GatedMLP(
                hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, dtype=dtype
            )
        norm = {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps, "dtype": dtype}
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(**norm), RMSNorm(**norm)

    def forward(
        self, position_ids: Tensor, hidden_states: Tensor, attn_metadata: Any, residual: Tensor | None,
        spec_metadata: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if residual is None:
            residual, normed = hidden_states, self.input_layernorm(hidden_states)
        else:
            normed, residual = self.input_layernorm(hidden_states, residual)
        attended = self.self_attn(
            position_ids=position_ids, hidden_states=normed, attn_metadata=attn_metadata
        )
        normed, residual = self.post_attention_layernorm(attended, residual)
        update = self.mlp(normed)
        if spec_metadata is not None:
            spec_metadata.maybe_capture_hidden_states(self.layer_idx, update, residual)
        return update, residual


class Glm4MTP(Glm4DecoderLayer):
    """Embedding and hidden row joined, a layer over them, and the norm that it hands on."""

    def __init__(self, model_config, layer_idx, aux_stream_dict, is_separate_draft_engine=False):
        super().__init__(model_config, layer_idx, aux_stream_dict)
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        norm = {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps, "dtype": dtype}
        self.enorm, self.hnorm = RMSNorm(**norm), RMSNorm(**norm)
        self.eh_proj = nn.Linear(
            2 * config.hidden_size, config.hidden_size, bias=False, dtype=dtype, device=device()
        )
        self.shared_head = DeepseekV3MTPHead(model_config)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids, position_ids, hidden_states, embed_tokens, attn_metadata, all_rank_num_tokens=None,
        **kwargs,
    ):  # fmt: skip
        joined = torch.cat((self.enorm(embed_tokens(input_ids)), self.hnorm(hidden_states)), dim=-1)
        update, residual = super().forward(position_ids, self.eh_proj(joined), attn_metadata, None)
        return self.shared_head.norm(update, residual)[0]


class Glm4Model(nn.Module):
    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.num_hidden_layers, self.aux_stream_dict = config.num_hidden_layers, {}
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device())
        self.layers = nn.ModuleList(
            Glm4DecoderLayer(model_config, i, self.aux_stream_dict) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden_size=config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def forward(
        self, attn_metadata: Any, input_ids: Tensor | None = None, position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, spec_metadata: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        # The MTP layer stands behind these.
        for layer in self.layers[: self.num_hidden_layers]:
            hidden, residual = layer(
                position_ids=position_ids, hidden_states=hidden, attn_metadata=attn_metadata, residual=residual,
                spec_metadata=spec_metadata,
            )  # fmt: skip
        return self.norm(hidden, residual)[0]


@register_auto_model("Glm4MoeForCausalLM")
class Glm4MoeForCausalLM(SpecDecOneEngineForCausalLM):
    """The MTP layer is the draft model's, and a layer of the model besides."""

    def __init__(self, model_config):
        super().__init__(Glm4Model(model_config), model_config)
        if self.drafts_with_mtp:
            self.model.layers.extend(self.draft_model.mtp_layers)  # pyright: ignore

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        count = self.config.num_hidden_layers
        super().load_weights(without_mtp(weights, count, drafts=self.drafts_with_mtp))
