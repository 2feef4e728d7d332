"""The EAGLE3 draft model, with the modules and calls of TensorRT-LLM's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from .attention import Attention, PositionalEmbeddingParams
from .layout import device
from .model_parts import DecoderModelForCausalLM, GatedMLP, ModelConfig, RMSNorm, load_state
from .rope import RopeParams


def read_draft_config(model_config: ModelConfig) -> ModelConfig:
    """The head's own config, under the target's runtime options."""
    raw = json.loads(
        (Path(model_config.spec_config.speculative_model) / "config.json").read_text(encoding="utf-8")
    )
    config = LlamaConfig.from_dict(raw)
    config.draft_vocab_size = raw.get("draft_vocab_size") or config.vocab_size
    # The head's layer rotates in the backend, whatever the target's do.
    return replace(model_config, pretrained_config=config, rope_fusion=True)


class Eagle3DecoderLayer(nn.Module):
    def __init__(self, model_config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.layer_idx = layer_idx
        self.self_attn = Attention(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            bias=getattr(config, "attention_bias", False),
            pos_embd_params=PositionalEmbeddingParams(RopeParams.from_config(config)),
            layer_idx=layer_idx,
            dtype=dtype,
            config=model_config,
            head_dim=config.head_dim,
            rope_fusion=model_config.rope_fusion,
            input_size=2 * config.hidden_size,
        )
        self.mlp = GatedMLP(
            hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, dtype=dtype
        )
        norm = {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps, "dtype": dtype}
        self.input_layernorm, self.hidden_norm = RMSNorm(**norm), RMSNorm(**norm)
        self.post_attention_layernorm = RMSNorm(**norm)

    def forward(
        self,
        position_ids: Tensor,
        embeds: Tensor,
        hidden_states: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
    ) -> tuple[Tensor, Tensor]:
        joined = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden_states)), dim=-1)
        attended = self.self_attn(
            position_ids=position_ids, hidden_states=joined, attn_metadata=attn_metadata
        )
        normed, residual = self.post_attention_layernorm(attended, hidden_states)
        out = self.mlp(normed)
        spec_metadata.maybe_capture_hidden_states(self.layer_idx, out, residual)
        return out, residual


class Eagle3DraftModel(nn.Module):
    def __init__(self, model_config: ModelConfig, start_layer_idx: int = 0) -> None:
        super().__init__()
        config = model_config.pretrained_config
        self.dtype, self.hidden_size = model_config.torch_dtype, config.hidden_size
        place = {"dtype": self.dtype, "device": device()}
        count = model_config.spec_config.num_capture_layers
        self.fc = nn.Linear(count * config.hidden_size, config.hidden_size, bias=False, **place)
        self.midlayer = Eagle3DecoderLayer(model_config, start_layer_idx)
        self.norm = RMSNorm(hidden_size=config.hidden_size, eps=config.rms_norm_eps, dtype=self.dtype)
        if config.draft_vocab_size != config.vocab_size:
            offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int32, device=device())
            self.d2t = nn.Parameter(offsets, requires_grad=False)
        # The target's, once weights are loaded.
        self.embed_tokens: nn.Module | None = None

    def forward(
        self, attn_metadata: Any, input_ids: Tensor | None = None, position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, spec_metadata: Any = None, hidden_states: Tensor | None = None,
        all_rank_num_tokens: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Normed rows, for logits, and the rows before the norm, for the next step."""
        assert self.embed_tokens is not None and hidden_states is not None
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids).to(self.dtype)
        hidden, residual = self.midlayer(
            position_ids=position_ids, embeds=inputs_embeds, hidden_states=hidden_states,
            attn_metadata=attn_metadata, spec_metadata=spec_metadata,
        )  # fmt: skip
        return self.norm(hidden, residual)


class Eagle3ForCausalLM(DecoderModelForCausalLM):
    def __init__(self, model_config: ModelConfig, start_layer_idx: int = 0) -> None:
        config = model_config.pretrained_config
        super().__init__(
            Eagle3DraftModel(model_config, start_layer_idx), config=model_config, hidden_size=config.hidden_size,
            vocab_size=config.draft_vocab_size,
        )  # fmt: skip
        self.load_lm_head_from_target = True

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """An EAGLE3 checkpoint. `t2d`, and an embedding of its own, are left aside as in the real one."""
        named = {}
        for name, weight in weights.items():
            if "lm_head" in name:
                self.load_lm_head_from_target = False
                named[name] = weight
            else:
                named["model." + name.replace("layers.0.", "midlayer.", 1)] = weight
        used = load_state(self, named)
        left = {"model.t2d", "model.embed_tokens.weight"}
        assert set(named) - used <= left, sorted(set(named) - used)

    def load_weights_from_target_model(self, target_model: Any) -> None:
        if self.model.embed_tokens is None:
            self.model.embed_tokens = target_model.model.embed_tokens
        if self.load_lm_head_from_target:
            self.lm_head = target_model.lm_head

    def apply_eagle3_fc(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states.to(self.model.dtype)
        if hidden_states.shape[-1] == self.model.hidden_size:
            return hidden_states
        return self.model.fc(hidden_states)
