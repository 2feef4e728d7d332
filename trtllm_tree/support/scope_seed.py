"""The lines of the seed's Scope. Must not know who prints or applies them."""

from __future__ import annotations

from trtllm_tree.config.engine import KV_CACHE_DTYPE_RULE
from trtllm_tree.config.host_rules import TREE_REFUSALS, VERIFY_VARIABLE
from trtllm_tree.config.model_rules import LATENT_DRAFT_RULE, LATENT_MODELS, MTP_MODELS, MULTI_DEPTH_RULE
from trtllm_tree.support.head import GROUPED_HEADS_RULE, SEES_EVERY_KEY_RULE
from trtllm_tree.support.kv_scales import UNSCALED_RULE
from trtllm_tree.support.model_asks import latent, mamba2, other_recurrent, sinks, sliding, token_history
from trtllm_tree.support.mtp_weights import MTP_LAYER_RULE
from trtllm_tree.support.scope_line import (
    EVERYWHERE,
    MODEL,
    OPTION,
    REQUEST,
    ScopeLine,
    embedded_only,
    keyed,
    nowhere,
    tensorrt_llm_only,
)

# Where it is decided whether a run asks for a line.
_HEAD = "support/head.py, on the head's files"
_BACKENDS = "support/resolve.py, on the attention backends"
_DRAFTER = "config/speculative.py, on the options"
_CACHE = "config/engine.py, on the options"
_SCALES = "support/kv_scales.py, on the checkpoints' scales"
_MTP = "support/mtp.py, on the model's config.json"
_MTP_WEIGHTS = "support/mtp.py, on the model's config.json, and support/mtp_weights.py, on its weights"
_NOTHING = "by construction"

_DECODING_TYPE = ("speculative_config.decoding_type", "decoding_type")
_KV_DTYPE = ("kv_cache_config.dtype", "kv_cache_dtype")

SEED_LINES: tuple[ScopeLine, ...] = (
    ScopeLine(
        id="eagle3",
        what="EAGLE3 drafters",
        answers=EVERYWHERE,
        checked=_HEAD,
        options=("speculative_model", "speculative_config.speculative_model"),
    ),
    ScopeLine(
        id="mtp",
        what="MTP drafters, EAGLE-style: the target's one MTP layer, run S times",
        answers=EVERYWHERE,
        checked=_MTP_WEIGHTS,
        options=_DECODING_TYPE,
        values=("MTP",),
        rule=MTP_LAYER_RULE,
        note="; ".join(f"{host}: {', '.join(models)}" for host, models in MTP_MODELS.items())
        + "; embedded: unquantised checkpoints",
    ),
    ScopeLine(
        id="multi_depth_mtp",
        what="Multi-depth MTP, a layer a step",
        answers=nowhere(MULTI_DEPTH_RULE),
        checked=_MTP,
        options=("speculative_config.use_mtp_vanilla",),
        rule=MULTI_DEPTH_RULE,
    ),
    ScopeLine(
        id="eagle4",
        what="EAGLE4 drafters",
        answers=nowhere("not drafted with yet"),
        checked=_DRAFTER,
        options=_DECODING_TYPE,
        values=("Eagle4",),
    ),
    ScopeLine(
        id="greedy",
        what="Greedy decoding",
        answers=EVERYWHERE,
        checked=REQUEST,
    ),
    ScopeLine(
        id="sampled",
        what="Sampling above temperature 0 with top-k, top-p and min-p (Gumbel noise keyed by seed and position)",
        answers=EVERYWHERE,
        checked=REQUEST,
        options=("temperature",),
        note=f"TensorRT-LLM: {VERIFY_VARIABLE} unset or gumbel",
    ),
    ScopeLine(
        id="rejection",
        what="Recursive rejection sampling (exact in law, other tokens than plain decoding's)",
        answers=EVERYWHERE,
        checked=OPTION,
        options=(f"env_overrides.{VERIFY_VARIABLE}",),
        note=f"use_rejection_sampling; TensorRT-LLM also by {VERIFY_VARIABLE}",
    ),
    ScopeLine(
        id="gqa",
        what="Grouped-head attention (MHA, GQA, MQA)",
        answers=EVERYWHERE,
        checked=_BACKENDS,
        options=("attn_backend", "verify attention backend", "lanes attention backend"),
        note="shapes and GPUs: see the leaves",
    ),
    ScopeLine(
        id="mla_target",
        what="MLA targets",
        answers=EVERYWHERE,
        checked=_BACKENDS,
        found=latent,
        note=f"embedded: {', '.join(LATENT_MODELS)}",
    ),
    ScopeLine(
        id="mla_draft",
        what="MLA drafts",
        answers=embedded_only(f"{GROUPED_HEADS_RULE}; {LATENT_DRAFT_RULE}"),
        checked=_HEAD,
        options=("speculative_model: kv_lora_rank",),
        note="embedded: MTP layers; EAGLE3 heads have grouped heads",
    ),
    keyed("kv_parallelism", "KV (context) parallelism", "context_parallel_size", "cp_config"),
    ScopeLine(
        id="kv_model_dtype",
        what="KV cache in the model's dtype",
        answers=EVERYWHERE,
        checked=_BACKENDS,
        note="bfloat16, float16; float32 on the embedded host",
    ),
    ScopeLine(
        id="kv_fp8",
        what="KV cache in FP8 E4M3, unscaled",
        answers=EVERYWHERE,
        checked=_SCALES,
        rule=UNSCALED_RULE,
        note="kv_cache_config.dtype: fp8; scales other than 1 in a checkpoint are refused by the tensor's name",
    ),
    ScopeLine(
        id="kv_other_dtypes",
        what="KV cache in NVFP4, INT8 or E5M2",
        answers=nowhere(KV_CACHE_DTYPE_RULE),
        checked=_CACHE,
        options=_KV_DTYPE,
    ),
    ScopeLine(
        id="full_history",
        what="Full-history KV cache groups",
        answers=EVERYWHERE,
        checked=_NOTHING,
    ),
    keyed("windowed_cache", "KV cache groups that drop old pages", "kv_cache_config.max_attention_window"),
    ScopeLine(
        id="mamba2",
        what="Mamba2 layers, a state staged for every node",
        answers=tensorrt_llm_only("Mamba2 layers are not verified as trees on this host"),
        checked=MODEL,
        found=mamba2,
        note="TensorRT-LLM: Nemotron-H, through update_mamba_states; replayed states are refused at the first warm-up",
    ),
    ScopeLine(
        id="recurrent",
        what="Linear-attention layers of other kinds (GDN, KDA), staged or replayed",
        answers=nowhere(
            "recurrent layers are not verified as trees yet",
            on_tensorrt_llm="TensorRT-LLM's recurrent layers of this kind read no tree: they follow a chain",
        ),
        checked=MODEL,
        found=other_recurrent,
    ),
    ScopeLine(
        id="structured_output",
        what="Structured output: JSON schema, regex, choice, EBNF (a node's mask is the grammar's after its ancestors)",
        answers=embedded_only(TREE_REFUSALS["guided_decoding_backend"]),
        checked="config/guided_decoding.py, for each request",
        options=("guided_decoding_backend",),
        note="embedded: with the package xgrammar; schemas that a grammar cannot hold are refused by the keyword",
    ),
    ScopeLine(
        id="mixed_batches",
        what="Prefill and decode rows in one forward",
        answers=nowhere("a tree's forward holds windows of N rows only"),
        checked=_NOTHING,
        note="the embedded engine alternates prefill and decode forwards",
    ),
    keyed("pipeline_parallelism", "Pipeline parallelism", "pipeline_parallel_size"),
    keyed("disaggregation", "Prefill/decode disaggregation", "cache_transceiver_config"),
    keyed("attention_dp", "Attention data parallelism", "enable_attention_dp"),
    ScopeLine(
        id="sliding_target",
        what="Sliding windows in target layers",
        answers=embedded_only(
            "target layers have no sliding window on this host; leaves refuse one per call"
        ),
        checked=MODEL,
        found=sliding,
        note="embedded: by position, with the leaf `reference`; the specification has none",
    ),
    ScopeLine(
        id="sliding_lanes",
        what="Sliding windows in draft layers (lanes see the window frozen at the round's prefix end)",
        answers=nowhere(SEES_EVERY_KEY_RULE),
        checked=_HEAD,
        options=("speculative_model: sliding_window", "speculative_model: layer_types"),
        note="the cascade has the frozen window; no drafter asks for it yet",
    ),
    ScopeLine(
        id="sinks",
        what="Attention sinks",
        answers=embedded_only(
            "target layers have no attention sinks on this host; leaves refuse them per call"
        ),
        checked=MODEL,
        found=sinks,
        note="embedded: target layers, with the leaf `reference`; heads have none; the specification has none",
    ),
    ScopeLine(
        id="token_history",
        what="Models that read request token history or n-grams (Engram)",
        answers=nowhere("a node's history is its root path, which such inputs do not follow"),
        checked=MODEL,
        found=token_history,
    ),
    ScopeLine(
        id="own_backends",
        what="Target and draft each with an attention backend of their own",
        answers=EVERYWHERE,
        checked=_BACKENDS,
    ),
)
