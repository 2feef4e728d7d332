"""What a model's config.json says about its attention layers, as far as tree support depends on it.

Reads transformers' and DeepSeek's keys of the text part of a config. Must not know torch or transformers, so what
transformers would derive from a class's defaults is derived here only for keys that config.json spells out, and for
the number of MTP layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_tree.config.model_rules import (
    DEFAULT_MTP_LAYERS,
    FULL,
    NEUTRAL_OPTIONS,
    RECURRENT,
    SINK_MODELS,
    SLIDING,
)

# Names of layer kinds in configs that were written before transformers had one set of names.
_OLD_KINDS = {"attention": FULL, "global": FULL, "local": SLIDING, "sliding": SLIDING}
_RECURRENT_KINDS = ("mamba", "mamba2", "recurrent", "gated_deltanet", "ssm")
# Layers that hold no attention and no state.
_STATELESS_KINDS = ("moe", "mlp", "sparse", "dense")
_RECURRENT_KEYS = ("linear_num_value_heads", "mamba_num_heads", "mamba_d_state", "ssm_state_size", "ssm_cfg")
_MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
_HISTORY_WORDS = ("engram", "ngram")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """One model's attention.

    Attributes:
        model_type: transformers' name of the architecture.
        num_heads: Hq; None where config.json does not say.
        num_kv_heads: Hkv; 1 for a latent cache.
        head_dim: D; Dqk for a latent cache.
        value_dim: Dv of a latent cache (MLA); None for grouped heads.
        layer_kinds: the kinds of layers, sorted.
        sliding_window: its size in tokens, where a layer slides.
        sinks: attention sinks in its layers.
        dtype: the checkpoint's, None where it is not written.
        unknown_options: options of `NEUTRAL_OPTIONS` with another value, as pairs.
        quantization: method of its quantised weights.
        history_keys: keys that speak of request token history or n-gram inputs.
        num_mtp_layers: MTP layers behind the last layer, which a config counts whether or not the checkpoint has them.
        has_sectioned_rope: a token has several positions, each for a section of its channels (M-RoPE).
    """

    model_type: str
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    value_dim: int | None
    layer_kinds: tuple[str, ...]
    sliding_window: int | None
    sinks: bool
    dtype: str | None
    unknown_options: tuple[tuple[str, object], ...]
    quantization: str | None
    history_keys: tuple[str, ...]
    num_mtp_layers: int = 0
    has_sectioned_rope: bool = False

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether a layer keeps a recurrent state in place of keys and values."""
        return RECURRENT in self.layer_kinds

    @property
    def other_kinds(self) -> tuple[str, ...]:
        """Layer kinds that nothing here speaks of: chunked, indexed, compressed, convolutions, ..."""
        return tuple(kind for kind in self.layer_kinds if kind not in (FULL, SLIDING, RECURRENT))

    @property
    def head_ratio(self) -> int | None:
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads if self.num_heads and self.num_kv_heads else None


def read_model_facts(model_dir: Path) -> ModelFacts | None:
    """The facts of a model directory; None where there is no config.json to read them from."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return model_facts(config) if isinstance(config, dict) else None


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """The facts of a config.json; those of its `text_config` where it has one."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    heads = _size(text.get("num_attention_heads"))
    rank, rotary = _size(text.get("kv_lora_rank")), text.get("qk_rope_head_dim") or 0
    kinds = _layer_kinds(text)
    hidden = _size(text.get("hidden_size"))
    head_dim = _size(text.get("head_dim")) or (hidden // heads if hidden and heads else None)
    quantization = text.get("quantization_config") or config.get("quantization_config") or {}
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return ModelFacts(
        model_type=str(text.get("model_type") or config.get("model_type") or "unknown"),
        num_heads=heads,
        num_kv_heads=1 if rank else _size(text.get("num_key_value_heads")) or heads,
        head_dim=rank + rotary if rank else head_dim,
        value_dim=rank,
        layer_kinds=kinds,
        sliding_window=_size(text.get("sliding_window")) if SLIDING in kinds and _slides(text) else None,
        sinks=text.get("model_type") in SINK_MODELS,
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        unknown_options=tuple(
            (name, text[name])
            for name, neutral in NEUTRAL_OPTIONS.items()
            if text.get(name) not in (neutral, None)
        ),
        quantization=str(quantization.get("quant_method", "unnamed")) if quantization else None,
        history_keys=tuple(
            sorted(
                key for key, value in text.items() if value and any(word in key for word in _HISTORY_WORDS)
            )
        ),
        num_mtp_layers=_num_mtp_layers(text),
        has_sectioned_rope=any(
            isinstance(text.get(key), Mapping) and bool(text[key].get("mrope_section"))
            for key in ("rope_scaling", "rope_parameters")
        ),
    )


def _num_mtp_layers(text: Mapping[str, Any]) -> int:
    """A key that is null counts none; one that is not there, what transformers' class counts."""
    written = [_size(text[key]) or 0 for key in _MTP_KEYS if key in text]
    return max(written) if written else DEFAULT_MTP_LAYERS.get(str(text.get("model_type")), 0)


def _layer_kinds(text: Mapping[str, Any]) -> tuple[str, ...]:
    listed = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(listed, list) and listed:
        kinds = {_kind(str(kind)) for kind in listed}
    else:
        kinds = {SLIDING if _slides(text) else FULL}
    if str(text.get("model_type")).startswith("mamba"):
        kinds = {RECURRENT}
    elif any(text.get(key) for key in _RECURRENT_KEYS) or "M" in str(
        text.get("hybrid_override_pattern") or ""
    ):
        kinds.add(RECURRENT)
    return tuple(sorted(kinds - {*_STATELESS_KINDS}))


def _kind(name: str) -> str:
    return RECURRENT if name in _RECURRENT_KINDS else _OLD_KINDS.get(name, name)


def _slides(text: Mapping[str, Any]) -> bool:
    """A window that is not switched off (Qwen's `use_sliding_window`) is used."""
    return bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
