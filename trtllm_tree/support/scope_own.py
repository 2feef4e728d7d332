"""The lines that are ours: what the seed's Scope does not speak of. Must not know who prints or applies them."""

from __future__ import annotations

from trtllm_tree.config.host_rules import EMBEDDED_RULE, STATIC_TREE_RULE, TREE_REFUSALS
from trtllm_tree.config.model_rules import (
    LATENT_RULE,
    LATENT_SLIDING_RULE,
    LAYER_KINDS_RULE,
    NEUTRAL_OPTIONS,
    QUANTISED_LATENT_RULE,
    SLIDE_BY_MASK,
    SLIDE_BY_MASK_RULE,
    UNQUANTISED_REMEDY,
)
from trtllm_tree.config.speculative import TRTLLM_MAX_NODES
from trtllm_tree.config.tree_rules import MAX_NODES
from trtllm_tree.support.model_asks import (
    SOFTCAP,
    other_layers,
    other_options,
    quantised_latent,
    sectioned_rope,
    sliding_by_mask,
    sliding_latent,
    softcap,
    unknown_latent,
)
from trtllm_tree.support.scope_line import (
    MODEL,
    OPTION,
    REQUEST,
    ScopeLine,
    embedded_only,
    keyed,
    nowhere,
    tensorrt_llm_only,
)

OWN_LINES: tuple[ScopeLine, ...] = (
    ScopeLine(
        id="large_trees",
        what=f"Trees of more than {TRTLLM_MAX_NODES} nodes",
        answers=embedded_only(f"TensorRT-LLM's trees have at most {TRTLLM_MAX_NODES} nodes"),
        checked=OPTION,
        options=("speculative_config.max_total_draft_tokens", "speculative_config.dynamic_tree_max_topK"),
        note=f"up to {MAX_NODES}, the root included",
    ),
    ScopeLine(
        id="logit_edits",
        what="Repetition, presence, frequency penalties, logit bias, min_tokens, bad words, by each node's ancestors",
        answers=embedded_only(TREE_REFUSALS["speculative_config.enable_penalty"]),
        checked=REQUEST,
        options=("speculative_config.enable_penalty",),
        note="embedded: up to 2048 edited ids and 512 bad words of 2 to 32 tokens a request",
    ),
    ScopeLine(
        id="logprobs",
        what="Log-probabilities of output and prompt tokens",
        answers=embedded_only("no log-probabilities are returned with draft trees on this host"),
        checked=REQUEST,
        note="embedded: by the raw logits, with up to 20 likeliest tokens",
    ),
    ScopeLine(
        id="static_trees",
        what="Static trees",
        answers=nowhere(STATIC_TREE_RULE),
        checked=OPTION,
        options=("speculative_config.eagle_choices",),
    ),
    ScopeLine(
        id="tensor_parallelism",
        what="Tensor parallelism",
        answers=tensorrt_llm_only(EMBEDDED_RULE),
        checked=OPTION,
        options=("tensor_parallel_size",),
    ),
    ScopeLine(
        id="mla_other_models",
        what="MLA of other models",
        answers=tensorrt_llm_only(LATENT_RULE),
        checked=MODEL,
        found=unknown_latent,
    ),
    ScopeLine(
        id="mla_quantised",
        what="MLA with quantised weights",
        answers=tensorrt_llm_only(QUANTISED_LATENT_RULE),
        checked=MODEL,
        found=quantised_latent,
        remedy=UNQUANTISED_REMEDY,
    ),
    ScopeLine(
        id="mla_sliding",
        what="Sliding windows over latent (MLA) caches",
        answers=nowhere(LATENT_SLIDING_RULE),
        checked=MODEL,
        found=sliding_latent,
    ),
    ScopeLine(
        id="sliding_by_mask",
        what=f"Sliding windows of {', '.join(SLIDE_BY_MASK)}",
        answers=nowhere(SLIDE_BY_MASK_RULE, on_tensorrt_llm="as all sliding windows in target layers"),
        checked=MODEL,
        found=sliding_by_mask,
    ),
    ScopeLine(
        id="other_layers",
        what="Chunked, indexed, compressed or convolutional layers",
        answers=nowhere(LAYER_KINDS_RULE, on_tensorrt_llm="tree attention reads full-history caches only"),
        checked=MODEL,
        found=other_layers,
    ),
    ScopeLine(
        id="mrope",
        what="Several positions a token (M-RoPE)",
        answers=embedded_only("a tree's rows have one position each on this host"),
        checked=MODEL,
        found=sectioned_rope,
        note="embedded: text only, where all of them are equal; no test runs one",
    ),
    ScopeLine(
        id="softcap",
        what="Soft-capped attention scores",
        answers=nowhere("attention scores are not capped"),
        checked=MODEL,
        found=softcap,
        note="caps of the final logits are applied",
    ),
    ScopeLine(
        id="logit_options",
        what=f"Models with {', '.join(name for name in NEUTRAL_OPTIONS if name != SOFTCAP)}",
        answers=tensorrt_llm_only("the embedded engine computes their neutral values only"),
        checked=MODEL,
        found=other_options,
    ),
    keyed("sparse_attention", "Sparse attention", "sparse_attention_config"),
    keyed("kv_compression", "KV cache compression", "kv_cache_compression_config"),
    keyed("lora", "LoRA", "enable_lora", "lora_config"),
    keyed("beam_search", "Beam search", "max_beam_width"),
    keyed("kv_connector", "KV connectors", "kv_connector_config"),
    keyed(
        "acceptance_window",
        "Speculation that switches itself off",
        "speculative_config.acceptance_window",
        "speculative_config.acceptance_rate_window_size",
    ),
    keyed(
        "draft_len_schedule",
        "Draft lengths that follow the batch size",
        "speculative_config.draft_len_schedule",
        "speculative_config.max_concurrency",
    ),
    keyed(
        "two_model_flow",
        "The two-model flow",
        "speculative_config.eagle3_one_model",
        "speculative_config.mtp_eagle_one_model",
    ),
    keyed(
        "relaxed_acceptance",
        "Drafts that are accepted though the target would have decoded others",
        "speculative_config.use_relaxed_acceptance_for_thinking",
    ),
    keyed("suffix_automaton", "A suffix automaton beside the drafter", "speculative_config.sa_config"),
)
