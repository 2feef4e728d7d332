"""What the embedded engine makes of a model's config: the tables and words of its refusals, shared by all who refuse.

The engine applies them to a transformers config, `support.scope` to a bare config.json. Must not know either.
"""

from __future__ import annotations

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"

# Models with a learned sink a head in every layer; their configs have no word for it.
SINK_MODELS = ("gpt_oss",)
# Their layers slide by a mask that is built outside the attention call, which is not told.
SLIDE_BY_MASK = ("blt", "doge", "phimoe", "qwen2_moe")
# Models whose latent attention (MLA) is run; others share names of options, not the arithmetic.
LATENT_MODELS = ("deepseek_v3",)
# Models whose MTP layer is drafted with, by host. DeepSeek's is latent: see LATENT_DRAFT_RULE.
MTP_MODELS = {"embedded": ("deepseek_v3", "glm4_moe"), "tensorrt_llm": ("glm4_moe", "nemotron_h")}
# MTP layers of models whose config.json does not count them, as transformers' configs do.
DEFAULT_MTP_LAYERS = {"deepseek_v3": 1, "glm4_moe": 1}
# Models whose recurrent layers are Mamba2's.
MAMBA2_MODELS = ("nemotron_h",)
# Options whose other values change scores or logits in ways that are not computed.
NEUTRAL_OPTIONS = {
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier": 1.0,
    "unpadded_vocab_size": None,
}

LAYER_KINDS_RULE = f"the embedded engine runs {FULL} and {SLIDING} layers only"
LATENT_SLIDING_RULE = "layers over a latent cache do not slide"
SLIDE_BY_MASK_RULE = "this model's layers do not tell their attention call that they slide"
LATENT_RULE = (
    "of the models with latent attention (kv_lora_rank) the embedded engine runs "
    f"{' and '.join(LATENT_MODELS)} only"
)
NO_MTP_RULE = "the target has no MTP layer to draft with: config.json counts none (num_nextn_predict_layers)"
MULTI_DEPTH_RULE = "must be 1: one layer is run again for every step, and multi-depth MTP has a layer a step"
LATENT_DRAFT_RULE = (
    "TensorRT-LLM stores a drafter's latent rows itself, also where no page is allocated to them"
)
QUANTISED_LATENT_RULE = (
    "latent attention multiplies with kv_b_proj's weights themselves, so they must not be quantised"
)
UNQUANTISED_REMEDY = "Use a checkpoint in bfloat16, float16 or float32."


def neutral_rule(neutral: object) -> str:
    """The rule for an option of `NEUTRAL_OPTIONS` with another value than its neutral one."""
    return f"the embedded engine computes it for {neutral} only"


def mtp_rule(host: str, model_type: str) -> str:
    """The rule for a model whose MTP layer `host` does not draft with."""
    return f"this host drafts with the MTP layers of {' and '.join(MTP_MODELS[host])}, not of {model_type}"
