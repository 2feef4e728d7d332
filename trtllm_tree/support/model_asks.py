"""What a model asks for, by the facts of its config.json: one function for each wish that the scope has a line on.

Each gives the options and values that ask for it, or nothing. Must not know which host answers what.
"""

from __future__ import annotations

from trtllm_tree.config.model_rules import LATENT_MODELS, MAMBA2_MODELS, RECURRENT, SLIDE_BY_MASK
from trtllm_tree.support.model_facts import ModelFacts
from trtllm_tree.support.scope_line import Asked

SOFTCAP = "attn_logit_softcapping"


def latent(facts: ModelFacts) -> Asked:
    """Latent attention (MLA)."""
    return [("kv_lora_rank", facts.value_dim)] if facts.value_dim else []


def unknown_latent(facts: ModelFacts) -> Asked:
    """Latent attention of a model whose absorbed form is unknown here."""
    unknown = facts.value_dim and facts.model_type not in LATENT_MODELS
    return [("model_type", facts.model_type)] if unknown else []


def quantised_latent(facts: ModelFacts) -> Asked:
    """Latent attention with quantised weights."""
    quantised = facts.value_dim and facts.quantization
    return [("quantization_config", facts.quantization)] if quantised else []


def sliding(facts: ModelFacts) -> Asked:
    """Sliding windows."""
    return [("sliding_window", facts.sliding_window)] if facts.sliding_window else []


def sliding_latent(facts: ModelFacts) -> Asked:
    """Sliding windows over latent rows."""
    return sliding(facts) if facts.value_dim else []


def sliding_by_mask(facts: ModelFacts) -> Asked:
    """Sliding windows that its layers do not tell their attention call."""
    return sliding(facts) if facts.model_type in SLIDE_BY_MASK else []


def sinks(facts: ModelFacts) -> Asked:
    """Attention sinks."""
    return [("model_type", facts.model_type)] if facts.sinks else []


def sectioned_rope(facts: ModelFacts) -> Asked:
    """Several positions a token (M-RoPE)."""
    return [("mrope_section", "set")] if facts.has_sectioned_rope else []


def mamba2(facts: ModelFacts) -> Asked:
    """Mamba2 layers."""
    return _recurrent(facts) if facts.model_type in MAMBA2_MODELS else []


def other_recurrent(facts: ModelFacts) -> Asked:
    """Recurrent layers of other kinds."""
    return [] if facts.model_type in MAMBA2_MODELS else _recurrent(facts)


def _recurrent(facts: ModelFacts) -> Asked:
    return [("layer_types", [RECURRENT])] if facts.has_recurrent_layers else []


def other_layers(facts: ModelFacts) -> Asked:
    """Layers of kinds that nobody here knows."""
    return [("layer_types", list(facts.other_kinds))] if facts.other_kinds else []


def token_history(facts: ModelFacts) -> Asked:
    """A request's tokens, or n-grams of them."""
    return [(key, "set") for key in facts.history_keys]


def softcap(facts: ModelFacts) -> Asked:
    """Soft-capped attention scores."""
    return [pair for pair in facts.unknown_options if pair[0] == SOFTCAP]


def other_options(facts: ModelFacts) -> Asked:
    """Options away from their neutral values, that cap apart."""
    return [pair for pair in facts.unknown_options if pair[0] != SOFTCAP]
