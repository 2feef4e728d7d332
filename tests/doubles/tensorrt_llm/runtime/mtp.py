"""The target's own MTP layer as the draft model of one-model speculation, and its scorer."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from .model_parts import RMSNorm

# Where a model's layer is, by model_type.
_LAYERS = {"glm4_moe": ("glm", "Glm4MTP"), "nemotron_h": ("nemotron", "NemotronHMTP")}


class DeepseekV3MTPHead(nn.Module):
    """Scores rows that are normed already; its norm is the layer's to apply."""

    def __init__(self, model_config):
        super().__init__()
        config = model_config.pretrained_config
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.norm = RMSNorm(hidden_size=config.hidden_size, eps=eps, dtype=model_config.torch_dtype)

    def forward(self, hidden_states, lm_head, attn_metadata, return_context_logits=False):
        if not return_context_logits:
            hidden_states = hidden_states[attn_metadata.seq_lens_cuda.cumsum(0).long() - 1]
        lm_head.gather_output = False
        logits = lm_head(hidden_states, is_spec_decoding_head=True)
        lm_head.gather_output = True
        return logits


class MTPForCausalLM(nn.Module):
    """One layer that is run again and again; scores and embeddings are the target's modules."""

    def __init__(self, model_config, start_layer_idx=0, lm_head=None, model=None):
        super().__init__()
        assert model_config.spec_config.spec_dec_mode.is_mtp_eagle_one_model()
        module, name = _LAYERS[model_config.pretrained_config.model_type]
        layer: Any = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        self.mtp_layers = nn.ModuleList([layer(model_config, start_layer_idx, model.aux_stream_dict)])
        self.lm_head, self.embed_tokens = lm_head, model.embed_tokens


def without_mtp(weights: dict[str, Tensor], layer: int, *, drafts: bool) -> dict[str, Tensor]:
    """A checkpoint's tensors that a model loads: its MTP layer's if that drafts, and never what it shares."""
    prefix = f"model.layers.{layer}."
    shared = {f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"}
    return {
        name: weight
        for name, weight in weights.items()
        if name not in shared and (drafts or not name.startswith(prefix))
    }
