"""What a transformers config says about its layers' attention and about its logits, beyond shapes.

A layer may slide (see only the last keys), and it may have attention sinks. Both reach our attention call with each
layer's call, and are known here before a model is loaded. Whatever else changes scores or logits is refused by name: an
option that the engine does not look at must not be there. Must not know the cache or who attends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_tree.config.model_rules import (
    FULL,
    LATENT_SLIDING_RULE,
    LAYER_KINDS_RULE,
    NEUTRAL_OPTIONS,
    SINK_MODELS,
    SLIDE_BY_MASK,
    SLIDE_BY_MASK_RULE,
    SLIDING,
    neutral_rule,
)
from trtllm_tree.errors import Problem

# Options of attention calls that change the result, and that no call here may have.
_UNKNOWN_OPTIONS = ("softcap", "position_bias", "sinks")


@dataclass(frozen=True)
class LayerOptions:
    """What a layer asks of its attention.

    Attributes:
        sliding_window: S, a row at position p sees keys above p - S; None where it sees all.
        sinks: whether it has an attention sink a head.
    """

    sliding_window: int | None
    sinks: bool


def layer_options(config: Any) -> list[LayerOptions]:
    """The options of each layer.

    Where a config lists no layer types, every layer slides if the config has a window that is not switched off.
    """
    used = getattr(config, "use_sliding_window", None) is not False
    window = getattr(config, "sliding_window", None) or None if used else None
    kinds = getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
    sinks = config.model_type in SINK_MODELS
    return [LayerOptions(window if kind == SLIDING else None, sinks) for kind in kinds]


def option_problems(config: Any) -> list[Problem]:
    """Every option of the config that the embedded engine cannot honour."""
    problems: list[Problem] = []

    def refuse(option: str, value: object, rule: str) -> None:
        problems.append(Problem(f"model: {option}", value, rule, "Use another model."))

    kinds = set(getattr(config, "layer_types", None) or [FULL])
    if others := sorted(kinds - {FULL, SLIDING}):
        refuse("layer_types", others, LAYER_KINDS_RULE)
    windows = [options.sliding_window for options in layer_options(config) if options.sliding_window]
    if SLIDING in kinds and not windows and getattr(config, "use_sliding_window", None) is not False:
        refuse("sliding_window", getattr(config, "sliding_window", None), f"{SLIDING} layers need a size")
    if windows and getattr(config, "kv_lora_rank", None):
        refuse("sliding_window", windows[0], LATENT_SLIDING_RULE)
    if windows and config.model_type in SLIDE_BY_MASK:
        refuse("sliding_window", windows[0], SLIDE_BY_MASK_RULE)
    for option, neutral in NEUTRAL_OPTIONS.items():
        value = getattr(config, option, neutral)
        if value not in (neutral, None):
            refuse(option, value, neutral_rule(neutral))
    return problems


def softcap_logits(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Logits [M, V] as the model's own forward bounds them: cap * tanh(logits / cap)."""
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def call_problems(
    layer: int,
    promised: LayerOptions,
    *,
    sliding_window: int | None,
    s_aux: torch.Tensor | None,
    others: Mapping[str, Any],
) -> list[Problem]:
    """Where a layer's attention call differs from what the config promised: the net behind `option_problems`.

    Args:
        sliding_window, s_aux: the call's window and sinks.
        others: the rest of the call's options.
    """
    asked: dict[str, tuple[object, object]] = {
        "sliding_window": (sliding_window, promised.sliding_window),
        "s_aux": (s_aux is not None, promised.sinks),
        # Only modules that can attend both ways say so.
        "is_causal": (others.get("is_causal") is not False, True),
    }
    asked |= {name: (others.get(name) is not None, False) for name in _UNKNOWN_OPTIONS}
    remedy = "Use another model, or another version of transformers."
    return [
        Problem(f"model: layer {layer}: {name}", value, f"its config promised {wanted}", remedy)
        for name, (value, wanted) in asked.items()
        if value != wanted
    ]
