"""Targets that own a worker: the base class, Llama, and the other architectures' names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import Attention, PositionalEmbeddingParams
from .eagle3_model import Eagle3ForCausalLM, read_draft_config
from .layout import NEW, device
from .mla import MLA
from .model_parts import (
    DecoderModelForCausalLM,
    GatedMLP,
    ModelConfig,
    RMSNorm,
    load_state,
    register_auto_model,
)
from .mtp import MTPForCausalLM
from .rope import RopeParams
from .spec_worker import get_spec_worker


class LlamaDecoderLayer(nn.Module):
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
            head_dim=getattr(config, "head_dim", None),
            rope_fusion=model_config.rope_fusion,
        )
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
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(
            position_ids=position_ids, hidden_states=hidden_states, attn_metadata=attn_metadata
        )
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        if spec_metadata is not None:
            spec_metadata.maybe_capture_hidden_states(self.layer_idx, hidden_states, residual)
        return hidden_states, residual


class LlamaModel(nn.Module):
    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device())
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(model_config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden_size=config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def forward(
        self, attn_metadata: Any, input_ids: Tensor | None = None, position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, spec_metadata: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        assert (input_ids is None) != (inputs_embeds is None)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        for layer in self.layers:
            hidden, residual = layer(
                position_ids=position_ids, hidden_states=hidden, attn_metadata=attn_metadata, residual=residual,
                spec_metadata=spec_metadata,
            )  # fmt: skip
        return self.norm(hidden, residual)[0]


class SpecDecOneEngineForCausalLM(DecoderModelForCausalLM):
    """A target that makes its draft model and worker by itself."""

    def __init__(self, model, model_config, hidden_size=None, vocab_size=None):
        config = model_config.pretrained_config
        super().__init__(
            model, config=model_config, hidden_size=hidden_size or config.hidden_size,
            vocab_size=vocab_size or config.vocab_size,
        )  # fmt: skip
        self.draft_model = self.draft_config = self.spec_worker = None
        self.use_separate_draft_kv_cache = False
        self.spec_config = spec_config = model_config.spec_config
        if spec_config is not None and spec_config.spec_dec_mode.use_one_engine():
            self.use_separate_draft_kv_cache = spec_config._allow_separate_draft_kv_cache
            if self.drafts_with_mtp:
                self.draft_model = MTPForCausalLM(
                    model_config, config.num_hidden_layers, self.lm_head, self.model
                )
            else:
                self.draft_config = read_draft_config(model_config)
                self.draft_model = Eagle3ForCausalLM(self.draft_config, config.num_hidden_layers)
            self.epilogue.append(self.draft_model)
            self.spec_worker = get_spec_worker(
                spec_config, model_config, model_config.mapping,
                use_separate_draft_kv_cache=self.use_separate_draft_kv_cache,
            )  # fmt: skip
            if NEW:
                self.spec_worker.set_draft_model(self.draft_model)
            self.epilogue.append(self.spec_worker)
        self.layer_idx = -1

    @property
    def drafts_with_mtp(self) -> bool:
        return self.spec_config is not None and self.spec_config.spec_dec_mode.is_mtp_one_model()

    def forward(
        self, attn_metadata, input_ids=None, position_ids=None, inputs_embeds=None, return_context_logits=False,
        spec_metadata=None, resource_manager=None, **kwargs,
    ):  # fmt: skip
        hidden = self.model(
            input_ids=input_ids, attn_metadata=attn_metadata, position_ids=position_ids,
            inputs_embeds=inputs_embeds, spec_metadata=spec_metadata, **kwargs,
        )  # fmt: skip
        if self.spec_worker is None:
            return self.logits_processor(hidden, self.lm_head, attn_metadata, return_context_logits)
        logits = self.logits_processor(hidden[spec_metadata.gather_ids], self.lm_head, attn_metadata, True)
        return self.spec_worker(
            input_ids=input_ids, position_ids=position_ids, hidden_states=hidden, logits=logits,
            attn_metadata=attn_metadata, spec_metadata=spec_metadata, draft_model=self.draft_model,
            resource_manager=resource_manager,
        )  # fmt: skip

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """The target's checkpoint, all of it."""
        if "lm_head.weight" not in weights:
            weights = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
        target = nn.Module()
        target.model, target.lm_head = self.model, self.lm_head
        used = load_state(target, weights)
        missing = {name for name, _ in target.named_parameters()} - {_joined(name) for name in used}
        assert used == set(weights) and not missing, (sorted(set(weights) - used), sorted(missing))

    def load_draft_weights(self, weights: dict[str, Tensor]) -> None:
        """The head's checkpoint, then what it shares with the target."""
        assert self.draft_model is not None
        self.draft_model.load_weights(weights)
        self.draft_model.load_weights_from_target_model(self)


def _joined(name: str) -> str:
    for part, whole in (("q_proj", "qkv_proj"), ("k_proj", "qkv_proj"), ("v_proj", "qkv_proj"),
                        ("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj")):  # fmt: skip
        if f".{part}." in name:
            return name.replace(f".{part}.", f".{whole}.")
    return name


@register_auto_model("LlamaForCausalLM")
class LlamaForCausalLM(SpecDecOneEngineForCausalLM):
    def __init__(self, model_config):
        super().__init__(LlamaModel(model_config), model_config)


@register_auto_model("Qwen3ForCausalLM")
class Qwen3ForCausalLM(SpecDecOneEngineForCausalLM):
    """A name only: its layers are a Llama's."""

    def __init__(self, model_config):
        super().__init__(LlamaModel(model_config), model_config)


@register_auto_model("Qwen3MoeForCausalLM")
class Qwen3MoeForCausalLM(SpecDecOneEngineForCausalLM):
    """A name only."""

    def __init__(self, model_config):
        super().__init__(LlamaModel(model_config), model_config)


@register_auto_model("MistralForCausalLM")
class MistralForCausalLM(DecoderModelForCausalLM):
    """Does not derive from the class that owns a worker."""

    def __init__(self, model_config):
        config = model_config.pretrained_config
        super().__init__(
            LlamaModel(model_config), config=model_config, hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
        )  # fmt: skip


class _DeepseekLayers(nn.Module):
    """Decoder layers around transformers' modules, which arrive with the weights."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        self._model_config = model_config

    def take(self, source: Any) -> None:
        """Use the modules of transformers' model."""
        self.embed_tokens, self.norm, self.layers = source.embed_tokens, source.norm, source.layers
        for index, layer in enumerate(self.layers):
            layer.self_attn = MLA(self._model_config, index, layer.self_attn)

    def forward(
        self,
        attn_metadata: Any,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        spec_metadata: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(hidden)
            hidden = hidden + layer.self_attn(position_ids, normed, attn_metadata)
            # Experts of transformers want a batch.
            update = layer.mlp(layer.post_attention_layernorm(hidden)[None])[0]
            if spec_metadata is not None:
                spec_metadata.maybe_capture_hidden_states(index, update, hidden)
            hidden = hidden + update
        return self.norm(hidden)


@register_auto_model("DeepseekV3ForCausalLM")
class DeepseekV3ForCausalLM(SpecDecOneEngineForCausalLM):
    """Latent attention; weights and experts are transformers'."""

    def __init__(self, model_config):
        super().__init__(_DeepseekLayers(model_config), model_config)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        from transformers import DeepseekV3ForCausalLM as Source

        dtype, path = self.model_config.torch_dtype, self.config._name_or_path
        source = Source.from_pretrained(path, dtype=dtype, local_files_only=True).to(device())
        self.model.take(source.model)
        self.lm_head = source.lm_head


@register_auto_model("GptOssForCausalLM")
class GptOssForCausalLM(SpecDecOneEngineForCausalLM):
    """A name only."""

    def __init__(self, model_config):
        super().__init__(LlamaModel(model_config), model_config)


def torch_dtype_of(config: Any) -> torch.dtype:
    found = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, found) if isinstance(found, str) else found
