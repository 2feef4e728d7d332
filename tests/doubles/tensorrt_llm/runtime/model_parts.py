"""Modules and configuration that targets and draft models share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .layout import device

MODEL_CLASS_MAPPING: dict[str, Any] = {}


def register_auto_model(name):
    """Put a model class under an architecture; the last one wins."""

    def decorate(cls: Any) -> Any:
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorate


def model_class(architecture: str) -> Any:
    """Who serves an architecture; the built-in models are imported first."""
    for name in ("deepseekv3", "glm", "gpt_oss", "llama", "mistral", "nemotron_h", "qwen3", "qwen3_moe"):
        importlib.import_module(f"tensorrt_llm._torch.models.modeling_{name}")
    return MODEL_CLASS_MAPPING[architecture]


@dataclass
class Mapping:
    """One rank.

    Attributes:
        shards: of the double: what all ranks hold, given what this one does.
    """

    rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    cp_size: int = 1
    moe_ep_size: int = 1
    enable_attention_dp: bool = False
    shards: Callable[[Tensor], list[Tensor]] | None = None

    def has_cp_helix(self) -> bool:
        return False

    def is_last_pp_rank(self) -> bool:
        return True


@dataclass
class QuantConfig:
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None


@dataclass
class ModelConfig:
    """What a model class is built from.

    Attributes:
        kv_cache_dtype: of the pools; the real one derives it from `quant_config`.
        rope_fusion: the double's switch; the real one decides by model class.
    """

    pretrained_config: Any
    mapping: Mapping = field(default_factory=Mapping)
    quant_config: QuantConfig = field(default_factory=QuantConfig)
    spec_config: Any = None
    attn_backend: str = "TRTLLM"
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    lora_config: Any = None
    sparse_attention_config: Any = None
    extra_attrs: dict[str, Any] = field(default_factory=dict)
    torch_dtype: torch.dtype = torch.float32
    kv_cache_dtype: torch.dtype = torch.float32
    rope_fusion: bool = True

    def cache_quant(self) -> Any:
        """What attention layers are told of the cache."""
        return SimpleNamespace(kv_cache_dtype=self.kv_cache_dtype)

    def get_quant_config(self, name: str | None = None) -> QuantConfig:
        return self.quant_config


class RMSNorm(nn.Module):
    """Normalise, and add the residual first where one is given."""

    def __init__(self, *, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device())), eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is not None:
            x = residual = x + residual
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        normed = self.weight * normed.to(x.dtype)
        return normed if residual is None else (normed, residual)


class GatedMLP(nn.Module):
    """SwiGLU with the gate and the rise in one matrix."""

    def __init__(self, *, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device(), "bias": False}
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, **place)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        gate, rise = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * rise)


class LMHead(nn.Linear):
    """Scores of the vocabulary. Sharded over ranks the real one gives a rank's columns, unless it is told to gather."""

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype) -> None:
        super().__init__(embedding_dim, num_embeddings, bias=False, dtype=dtype, device=device())
        self.num_embeddings, self.gather_output = num_embeddings, True

    def forward(self, input: Tensor, *, is_spec_decoding_head: bool = False) -> Tensor:
        return super().forward(input)


class LogitsProcessor(nn.Module):
    """Scores of given rows, or of each request's last one."""

    def forward(
        self, hidden: Tensor, lm_head: Any, attn_metadata: Any, return_context_logits: bool = False
    ) -> Tensor:
        if not return_context_logits:
            hidden = hidden[attn_metadata.seq_lens_cuda.cumsum(0).long() - 1]
        return lm_head(hidden).float()


class DecoderModelForCausalLM(nn.Module):
    """A decoder and its head."""

    def __init__(self, model: nn.Module, *, config: ModelConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.model, self.model_config, self.config = model, config, config.pretrained_config
        self.lm_head = LMHead(vocab_size, hidden_size, config.torch_dtype)
        self.logits_processor = LogitsProcessor()
        self.epilogue: list[Any] = []


def load_state(module: nn.Module, weights: dict[str, Tensor]) -> set[str]:
    """Copy weights by name, joining what the modules hold joined; returns the names that were used."""
    joined = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    used: set[str] = set()
    for name, parameter in module.named_parameters():
        owner = name.split(".")[-2] if "." in name else ""
        names = [name.replace(owner, part) for part in joined.get(owner, (owner,))] if owner else [name]
        if all(one in weights for one in names):
            parts = [weights[one].to(parameter.dtype) for one in names]
            with torch.no_grad():
                parameter.copy_(torch.cat(parts) if len(parts) > 1 else parts[0])
            used.update(names)
    return used
