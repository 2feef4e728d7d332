"""The EAGLE3 draft head: one decoder layer over the target's embedding and a fused feature.

Owns the head's forward pass and the loading of a checkpoint. Must not know trees, lanes, pages or caches: the
host hands in `attend`, which stores K and V and attends to whatever each row may see.

Maths: EAGLE-3 (Li et al., 2025); layout of SafeAILab's checkpoints, checked by `support.head`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from trtllm_tree.errors import ConfigError
from trtllm_tree.support.head import (
    WEIGHTS_FILE,
    TargetSize,
    aux_layer_ids,
    draft_vocab_size,
    head_problems_for,
)

# attend(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], scale) -> [T, Hq, D]; q and k are already rotated.
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class Eagle3Head(nn.Module):
    """An EAGLE3 head. T rows may belong to any mix of requests; rows meet only inside `attend`.

    Row i drafts from token i + 1 and the hidden row of position i, at RoPE position i. The hidden row is a
    fused target feature in the round's first step and the head's own pre-norm output afterwards.

    Attributes:
        d2t: int64 [Vd], the target id of draft id i is i + d2t[i]; None when the vocabularies are the same.
        aux_layer_ids: the three target layers whose input residual stream is the feature, lowest first.
    """

    d2t: Tensor | None

    def __init__(
        self,
        config: LlamaConfig,
        *,
        draft_vocab_size: int,
        feature_size: int,
        aux_layer_ids: tuple[int, int, int],
        embed_tokens: nn.Embedding,
    ) -> None:
        """Allocate the head for `config`; `feature_size` is the hidden size of the target."""
        super().__init__()
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.draft_vocab_size = draft_vocab_size
        self.aux_layer_ids = aux_layer_ids
        self.embed_tokens = embed_tokens
        self.fc = nn.Linear(3 * feature_size, self.hidden_size, bias=False)
        self.midlayer = _Eagle3Layer(config)
        self.num_kv_heads = self.midlayer.self_attn.num_kv_heads
        self.head_dim = self.midlayer.self_attn.head_dim
        self.norm = LlamaRMSNorm(self.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(self.hidden_size, draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", None)

    def fuse(self, features: Tensor) -> Tensor:
        """The hidden rows [T, H] of target features [T, 3 * H_target], low, mid, high side by side."""
        return self.fc(features.to(self.fc.weight.dtype))

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One draft step.

        Args:
            token_ids: integer [T], target vocabulary.
            hidden: [T, H], from `fuse` or an earlier call.
            positions: integer [T], RoPE positions.
            attend: the host's attention; see `Attend`.

        Returns:
            [T, H], the residual stream before the final norm: input of `logits` and of the next step.
        """
        # The rotary module wants a batch dim; its first argument only tells dtype and device.
        cos, sin = self.rotary(hidden, positions[None])
        embedding = self.embed_tokens(token_ids).to(hidden.dtype)
        return self.midlayer(embedding, hidden, cos[0], sin[0], attend)

    def logits(self, prenorm: Tensor) -> Tensor:
        """Scores [R, Vd] over the draft vocabulary of pre-norm rows [R, H]."""
        return self.lm_head(self.norm(prenorm))


class _Eagle3Layer(nn.Module):
    """A Llama decoder layer whose attention reads 2H channels: the embedding beside the hidden row."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.hidden_norm = LlamaRMSNorm(hidden, eps=eps)
        self.self_attn = _Eagle3Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.mlp = LlamaMLP(config)

    def forward(self, embedding: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), dim=-1)  # [T, 2H]
        hidden = hidden + self.self_attn(x, cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Eagle3Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        kv_heads, head_dim = config.num_key_value_heads, config.head_dim
        assert kv_heads is not None and head_dim is not None, "LlamaConfig fills in what config.json omits"
        self.num_kv_heads, self.head_dim = kv_heads, head_dim
        self.scale = head_dim**-0.5
        q_size, kv_size = config.num_attention_heads * head_dim, kv_heads * head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))  # [T, heads, D]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return self.o_proj(attend(q, k, v, self.scale).flatten(-2))


def load_eagle3_head(
    path: Path,
    *,
    target_config: PretrainedConfig,
    embed_tokens: nn.Embedding,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Eagle3Head:
    """Read an EAGLE3 checkpoint.

    Args:
        path: the head's folder.
        target_config: the target's config; its text part must match the head.
        embed_tokens: the target's embedding, shared unless the checkpoint brings its own.
        dtype: of all weights. float16 overflows where features are large (an attention sink at position 0).
        device: where the head lives; the target's embedding must already be there.

    Raises:
        ConfigError: every problem that `support.head` finds, before anything is loaded.
    """
    text = target_config.get_text_config()
    size = TargetSize(text.hidden_size, text.vocab_size, text.num_hidden_layers)
    problems = head_problems_for(path, size)
    if problems:
        raise ConfigError(problems)

    raw_config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config = LlamaConfig.from_dict(raw_config)
    weights = load_file(path / WEIGHTS_FILE, device=str(device))
    weights.pop("t2d", None)
    d2t = weights.pop("d2t", None)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    own_embedding = weights.pop("embed_tokens.weight", None)
    if own_embedding is not None:
        embed_tokens = nn.Embedding.from_pretrained(own_embedding)
    weights["embed_tokens.weight"] = embed_tokens.weight

    with torch.device("meta"):
        head = Eagle3Head(
            config,
            draft_vocab_size=draft_vocab_size(raw_config),
            feature_size=text.hidden_size,
            aux_layer_ids=aux_layer_ids(raw_config, text.num_hidden_layers),
            embed_tokens=embed_tokens,
        )
    head.load_state_dict(weights, strict=True, assign=True)
    # Frequencies are computed, not loaded, and stay float32 in every dtype.
    head.rotary = LlamaRotaryEmbedding(config).to(device)
    head.d2t = None if d2t is None else d2t.to(torch.int64)
    return head.eval()
