"""What draft trees go with and what they do not: each line of the seed's Scope, and the lines that are ours, as data.

`check` and docs/support.md print these lines, and `scope_problems` refuses models by them. Rules about options live
with the code that checks them (`config`) and are quoted here, never repeated. Must not know torch.
"""

from __future__ import annotations

from trtllm_tree.config.engine import KV_CACHE_DTYPE_RULE
from trtllm_tree.config.host_rules import (
    EMBEDDED_RULE,
    MTP_RULE,
    STATIC_TREE_RULE,
    TREE_REFUSALS,
    VERIFY_VARIABLE,
    Host,
)
from trtllm_tree.config.model_rules import (
    LATENT_MODELS,
    LATENT_RULE,
    LATENT_SLIDING_RULE,
    LAYER_KINDS_RULE,
    NEUTRAL_OPTIONS,
    QUANTISED_LATENT_RULE,
    RECURRENT,
    SLIDE_BY_MASK,
    SLIDE_BY_MASK_RULE,
    UNQUANTISED_REMEDY,
)
from trtllm_tree.config.speculative import TRTLLM_MAX_NODES
from trtllm_tree.config.tree_rules import MAX_NODES
from trtllm_tree.errors import Problem
from trtllm_tree.support.head import GROUPED_HEADS_RULE, SEES_EVERY_KEY_RULE
from trtllm_tree.support.kv_scales import UNSCALED_RULE
from trtllm_tree.support.model_facts import ModelFacts
from trtllm_tree.support.report import Refused, Supported
from trtllm_tree.support.scope_line import OPTION, Asked, ScopeLine, both, keyed

# Where it is decided whether a run asks for a line.
_MODEL = "support/scope.py, on the model's config.json"
_HEAD = "support/head.py, on the head's files"
_REQUEST = "config/sampling.py, for each request"
_BACKENDS = "support/resolve.py, on the attention backends"
_DRAFTER = "config/speculative.py, on the options"
_CACHE = "config/engine.py, on the options"
_SCALES = "support/kv_scales.py, on the checkpoints' scales"
_NOTHING = "by construction"


def _latent(facts: ModelFacts) -> Asked:
    return [("kv_lora_rank", facts.value_dim)] if facts.value_dim else []


def _unknown_latent(facts: ModelFacts) -> Asked:
    unknown = facts.value_dim and facts.model_type not in LATENT_MODELS
    return [("model_type", facts.model_type)] if unknown else []


def _quantised_latent(facts: ModelFacts) -> Asked:
    quantised = facts.value_dim and facts.quantization
    return [("quantization_config", facts.quantization)] if quantised else []


def _sliding(facts: ModelFacts) -> Asked:
    return [("sliding_window", facts.sliding_window)] if facts.sliding_window else []


def _sliding_latent(facts: ModelFacts) -> Asked:
    return _sliding(facts) if facts.value_dim else []


def _sliding_by_mask(facts: ModelFacts) -> Asked:
    return _sliding(facts) if facts.model_type in SLIDE_BY_MASK else []


def _sinks(facts: ModelFacts) -> Asked:
    return [("model_type", facts.model_type)] if facts.sinks else []


def _sectioned_rope(facts: ModelFacts) -> Asked:
    return [("mrope_section", "set")] if facts.has_sectioned_rope else []


def _recurrent(facts: ModelFacts) -> Asked:
    return [("layer_types", [RECURRENT])] if RECURRENT in facts.layer_kinds else []


def _other_layers(facts: ModelFacts) -> Asked:
    return [("layer_types", list(facts.other_kinds))] if facts.other_kinds else []


def _token_history(facts: ModelFacts) -> Asked:
    return [(key, "set") for key in facts.history_keys]


def _softcap(facts: ModelFacts) -> Asked:
    return [pair for pair in facts.unknown_options if pair[0] == _SOFTCAP]


def _other_options(facts: ModelFacts) -> Asked:
    return [pair for pair in facts.unknown_options if pair[0] != _SOFTCAP]


_YES = Supported()
_SOFTCAP = "attn_logit_softcapping"
_DECODING_TYPE = ("speculative_config.decoding_type", "decoding_type")
_KV_DTYPE = ("kv_cache_config.dtype", "kv_cache_dtype")

SCOPE: tuple[ScopeLine, ...] = (
    ScopeLine(
        id="eagle3",
        what="EAGLE3 drafters",
        embedded=_YES,
        tensorrt_llm=_YES,
        checked=_HEAD,
        options=("speculative_model", "speculative_config.speculative_model"),
    ),
    both(
        "mtp",
        "MTP drafters, EAGLE-style (the layer run S times) and multi-depth",
        MTP_RULE,
        OPTION,
        options=_DECODING_TYPE,
        values=("MTP",),
    ),
    both(
        "eagle4", "EAGLE4 drafters", "not drafted with yet", _DRAFTER, options=_DECODING_TYPE, values=("Eagle4",)
    ),
    ScopeLine(
        id="greedy", what="Greedy decoding", embedded=_YES, tensorrt_llm=_YES, checked=_REQUEST
    ),
    ScopeLine(
        id="sampled",
        what="Sampling above temperature 0 with top-k, top-p and min-p (Gumbel noise keyed by seed and position)",
        embedded=_YES,
        tensorrt_llm=_YES,
        checked=_REQUEST,
        options=("temperature",),
        note=f"TensorRT-LLM: {VERIFY_VARIABLE} unset or gumbel",
    ),
    ScopeLine(
        id="rejection",
        what="Recursive rejection sampling (exact in law, other tokens than plain decoding's)",
        embedded=_YES,
        tensorrt_llm=_YES,
        checked=OPTION,
        options=(f"env_overrides.{VERIFY_VARIABLE}",),
        note=f"use_rejection_sampling; TensorRT-LLM also by {VERIFY_VARIABLE}",
    ),
    ScopeLine(
        id="gqa",
        what="Grouped-head attention (MHA, GQA, MQA)",
        embedded=_YES,
        tensorrt_llm=_YES,
        checked=_BACKENDS,
        options=("attn_backend", "verify attention backend", "lanes attention backend"),
        note="shapes and GPUs: see the leaves",
    ),
    ScopeLine(
        id="mla_target",
        what="MLA targets",
        embedded=_YES,
        tensorrt_llm=_YES,
        checked=_BACKENDS,
        found=_latent,
        note=f"embedded: {', '.join(LATENT_MODELS)}",
    ),
    both("mla_draft", "MLA drafts", GROUPED_HEADS_RULE, _HEAD, options=("speculative_model: kv_lora_rank",)),
    keyed("kv_parallelism", "KV (context) parallelism", "context_parallel_size", "cp_config"),
    ScopeLine(
        id="kv_model_dtype",
        what="KV cache in the model's dtype",
        embedded=_YES,
        tensorrt_llm=_YES,
        checked=_BACKENDS,
        note="bfloat16, float16; float32 on the embedded host",
    ),
    ScopeLine(
        id="kv_fp8",
        what="KV cache in FP8 E4M3, unscaled",
        embedded=_YES,
        tensorrt_llm=_YES,
        checked=_SCALES,
        rule=UNSCALED_RULE,
        note="kv_cache_config.dtype: fp8; scales other than 1 in a checkpoint are refused by the tensor's name",
    ),
    both(
        "kv_other_dtypes", "KV cache in NVFP4, INT8 or E5M2", KV_CACHE_DTYPE_RULE, _CACHE, options=_KV_DTYPE
    ),
    ScopeLine(
        id="full_history",
        what="Full-history KV cache groups",
        embedded=_YES,
        tensorrt_llm=_YES,
        checked=_NOTHING,
    ),
    keyed("windowed_cache", "KV cache groups that drop old pages", "kv_cache_config.max_attention_window"),
    both(
        "recurrent",
        "Linear-attention layers (GDN, Mamba2), staged or replayed",
        "recurrent layers are not verified as trees yet",
        _MODEL,
        found=_recurrent,
    ),
    ScopeLine(
        id="structured_output",
        what="Structured output: JSON schema, regex, choice, EBNF (a node's mask is the grammar's after its ancestors)",
        embedded=_YES,
        tensorrt_llm=Refused(TREE_REFUSALS["guided_decoding_backend"]),
        checked="config/guided_decoding.py, for each request",
        options=("guided_decoding_backend",),
        note="embedded: with the package xgrammar; schemas that a grammar cannot hold are refused by the keyword",
    ),
    both(
        "mixed_batches",
        "Prefill and decode rows in one forward",
        "a tree's forward holds windows of N rows only",
        _NOTHING,
        note="the embedded engine alternates prefill and decode forwards",
    ),
    keyed("pipeline_parallelism", "Pipeline parallelism", "pipeline_parallel_size"),
    keyed("disaggregation", "Prefill/decode disaggregation", "cache_transceiver_config"),
    keyed("attention_dp", "Attention data parallelism", "enable_attention_dp"),
    ScopeLine(
        id="sliding_target",
        what="Sliding windows in target layers",
        embedded=_YES,
        tensorrt_llm=Refused("target layers have no sliding window on this host; leaves refuse one per call"),
        checked=_MODEL,
        found=_sliding,
        note="embedded: by position, with the leaf `reference`; the specification has none",
    ),
    both(
        "sliding_lanes",
        "Sliding windows in draft layers (lanes see the window frozen at the round's prefix end)",
        SEES_EVERY_KEY_RULE,
        _HEAD,
        options=("speculative_model: sliding_window", "speculative_model: layer_types"),
        note="the cascade has the frozen window; no drafter asks for it yet",
    ),
    ScopeLine(
        id="sinks",
        what="Attention sinks",
        embedded=_YES,
        tensorrt_llm=Refused("target layers have no attention sinks on this host; leaves refuse them per call"),
        checked=_MODEL,
        found=_sinks,
        note="embedded: target layers, with the leaf `reference`; heads have none; the specification has none",
    ),
    both(
        "token_history",
        "Models that read request token history or n-grams (Engram)",
        "a node's history is its root path, which such inputs do not follow",
        _MODEL,
        found=_token_history,
    ),
    ScopeLine(
        id="own_backends",
        what="Target and draft each with an attention backend of their own",
        embedded=_YES,
        tensorrt_llm=_YES,
        checked=_BACKENDS,
    ),
    ScopeLine(
        id="large_trees",
        what=f"Trees of more than {TRTLLM_MAX_NODES} nodes",
        embedded=_YES,
        tensorrt_llm=Refused(f"TensorRT-LLM's trees have at most {TRTLLM_MAX_NODES} nodes"),
        checked=OPTION,
        options=("speculative_config.max_total_draft_tokens", "speculative_config.dynamic_tree_max_topK"),
        beyond_seed=True,
        note=f"up to {MAX_NODES}, the root included",
    ),
    ScopeLine(
        id="logit_edits",
        what="Repetition, presence, frequency penalties, logit bias, min_tokens, bad words, by each node's ancestors",
        embedded=_YES,
        tensorrt_llm=Refused(TREE_REFUSALS["speculative_config.enable_penalty"]),
        checked=_REQUEST,
        options=("speculative_config.enable_penalty",),
        beyond_seed=True,
        note="embedded: up to 2048 edited ids and 512 bad words of 2 to 32 tokens a request",
    ),
    ScopeLine(
        id="logprobs",
        what="Log-probabilities of output and prompt tokens",
        embedded=_YES,
        tensorrt_llm=Refused("no log-probabilities are returned with draft trees on this host"),
        checked=_REQUEST,
        beyond_seed=True,
        note="embedded: by the raw logits, with up to 20 likeliest tokens",
    ),
    both(
        "static_trees",
        "Static trees",
        STATIC_TREE_RULE,
        OPTION,
        options=("speculative_config.eagle_choices",),
        beyond_seed=True,
    ),
    ScopeLine(
        id="tensor_parallelism", what="Tensor parallelism", checked=OPTION, options=("tensor_parallel_size",),
        embedded=Refused(EMBEDDED_RULE), tensorrt_llm=_YES, beyond_seed=True,
    ),
    ScopeLine(
        id="mla_other_models",
        what="MLA of other models",
        embedded=Refused(LATENT_RULE),
        tensorrt_llm=_YES,
        checked=_MODEL,
        found=_unknown_latent,
        beyond_seed=True,
    ),
    ScopeLine(
        id="mla_quantised",
        what="MLA with quantised weights",
        embedded=Refused(QUANTISED_LATENT_RULE),
        tensorrt_llm=_YES,
        checked=_MODEL,
        found=_quantised_latent,
        remedy=UNQUANTISED_REMEDY,
        beyond_seed=True,
    ),
    both(
        "mla_sliding",
        "Sliding windows over latent (MLA) caches",
        LATENT_SLIDING_RULE,
        _MODEL,
        found=_sliding_latent,
        beyond_seed=True,
    ),
    ScopeLine(
        id="sliding_by_mask",
        what=f"Sliding windows of {', '.join(SLIDE_BY_MASK)}",
        embedded=Refused(SLIDE_BY_MASK_RULE),
        tensorrt_llm=Refused("as all sliding windows in target layers"),
        checked=_MODEL,
        found=_sliding_by_mask,
        beyond_seed=True,
    ),
    ScopeLine(
        id="other_layers",
        what="Chunked, indexed, compressed or convolutional layers",
        embedded=Refused(LAYER_KINDS_RULE),
        tensorrt_llm=Refused("tree attention reads full-history caches only"),
        checked=_MODEL,
        found=_other_layers,
        beyond_seed=True,
    ),
    ScopeLine(
        id="mrope", what="Several positions a token (M-RoPE)", checked=_MODEL, found=_sectioned_rope, beyond_seed=True,
        embedded=_YES,
        tensorrt_llm=Refused("a tree's rows have one position each on this host"),
        note="embedded: text only, where all of them are equal; no test runs one",
    ),
    both(
        "softcap",
        "Soft-capped attention scores",
        "attention scores are not capped",
        _MODEL,
        found=_softcap,
        beyond_seed=True,
        note="caps of the final logits are applied",
    ),
    ScopeLine(
        id="logit_options",
        what=f"Models with {', '.join(name for name in NEUTRAL_OPTIONS if name != _SOFTCAP)}",
        embedded=Refused("the embedded engine computes their neutral values only"),
        tensorrt_llm=_YES,
        checked=_MODEL,
        found=_other_options,
        beyond_seed=True,
    ),
    keyed("sparse_attention", "Sparse attention", "sparse_attention_config", beyond_seed=True),
    keyed("kv_compression", "KV cache compression", "kv_cache_compression_config", beyond_seed=True),
    keyed("lora", "LoRA", "enable_lora", "lora_config", beyond_seed=True),
    keyed("beam_search", "Beam search", "max_beam_width", beyond_seed=True),
    keyed("kv_connector", "KV connectors", "kv_connector_config", beyond_seed=True),
    keyed("acceptance_window", "Speculation that switches itself off", "speculative_config.acceptance_window",
          "speculative_config.acceptance_rate_window_size", beyond_seed=True),
    keyed("draft_len_schedule", "Draft lengths that follow the batch size", "speculative_config.draft_len_schedule",
          "speculative_config.max_concurrency", beyond_seed=True),
    keyed("two_model_flow", "The two-model flow", "speculative_config.eagle3_one_model", beyond_seed=True),
    keyed("suffix_automaton", "A suffix automaton beside the drafter", "speculative_config.sa_config",
           beyond_seed=True),
)  # fmt: skip


def scope_problems(facts: ModelFacts, host: Host) -> list[Problem]:
    """Everything that a target of these facts asks for and `host` refuses."""
    problems: dict[str, Problem] = {}
    for line in SCOPE:
        answer = line.answer(host)
        if line.found is None or not isinstance(answer, Refused):
            continue
        for option, value in line.found(facts):
            # Lines about special cases come behind those about the option itself.
            name = f"model: {option}" if option != "layer_types" else f"model: {option} {value}"
            problems.setdefault(name, Problem(f"model: {option}", value, answer.reason, line.remedy))
    return list(problems.values())
