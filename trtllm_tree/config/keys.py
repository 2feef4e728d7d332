"""The keys of TensorRT-LLM's YAML (`TorchLlmArgs` and the sections read here), and messages about wrong ones.

Each table maps a key to the value that asks nothing of a host beyond what the embedded one does: the default
of TensorRT-LLM, save for `enable_block_reuse`. `ANY` marks keys that steer TensorRT-LLM's own machinery and
change no output. Names were read from `llm_args.py` of its main branch of 2026; values are its business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from trtllm_tree.errors import Problem

ANY = object()

DECODING_TYPES = (
    "AUTO", "DFlash", "DSpark", "Draft_Target", "Eagle", "Eagle3", "Lookahead", "MTP", "Medusa", "NGram", "PARD", "SA",
    "SaveState", "User_Provided",
)  # fmt: skip
# Those that SpeculativeConfig can say.
DRAFTERS = ("Eagle3", "MTP")

# Keys that SpeculativeConfig has a field for.
SPECULATIVE_FIELDS = (
    "decoding_type", "max_draft_len", "max_total_draft_tokens", "speculative_model", "speculative_model_dir",
    "use_dynamic_tree", "dynamic_tree_max_topK", "use_rejection_sampling",
)  # fmt: skip

# The other keys of both; newer versions count acceptance as a rate, older ones as a length.
_SHARED_OPTIONS: dict[str, object] = {
    "acceptance_length_threshold": None,
    "acceptance_rate_threshold": None,
    "acceptance_rate_window_size": None,
    "acceptance_window": None,
    "advanced_sampling_mode": "full",
    "allow_advanced_sampling": False,
    "draft_len_schedule": None,
    "enable_penalty": False,
    "load_format": None,
    "max_concurrency": None,
    "sa_config": None,
}
# Those of Eagle3DecodingConfig alone. `max_batch_size` is public in older versions only.
_EAGLE3_OPTIONS: dict[str, object] = {
    "eagle3_layers_to_capture": None,
    "eagle3_model_arch": "llama3",
    "eagle3_one_model": True,
    "eagle_choices": None,
    "greedy_sampling": True,
    "max_batch_size": None,
    "max_non_leaves_per_layer": None,
    "num_eagle_layers": None,
    "posterior_threshold": None,
}
# Those of MTPDecodingConfig alone.
_MTP_OPTIONS: dict[str, object] = {
    "begin_thinking_phase_token": 128798,
    "end_thinking_phase_token": 128799,
    "mtp_eagle_one_model": True,
    "relaxed_delta": 0.0,
    "relaxed_topk": 1,
    "use_mtp_vanilla": False,
    "use_relaxed_acceptance_for_thinking": False,
}
SPECULATIVE_OPTIONS = _SHARED_OPTIONS | _EAGLE3_OPTIONS | _MTP_OPTIONS

# Top-level keys and kv_cache_config keys that EngineConfig has a field for: key -> field.
ENGINE_FIELDS = {
    "model": "model",
    "dtype": "dtype",
    "max_batch_size": "max_batch_size",
    "max_num_tokens": "max_num_tokens",
    "max_seq_len": "max_seq_len",
    "kv_cache_config.tokens_per_block": "tokens_per_block",
    "kv_cache_config.dtype": "kv_cache_dtype",
    "kv_cache_config.max_tokens": "kv_cache_tokens",
}

SECTIONS = ("kv_cache_config", "speculative_config", "cuda_graph_config", "env_overrides")

KV_CACHE_OPTIONS: dict[str, object] = {
    "attention_dp_events_gather_period_ms": ANY,
    "avg_seq_len": None,
    "block_reuse_policy": "all_reusable",
    "copy_on_partial_reuse": ANY,
    "cross_kv_cache_fraction": None,
    "disk_cache_path": None,
    "disk_cache_size": None,
    "disk_prefetch_num_reqs": 0,
    "enable_block_reuse": False,
    "enable_kv_pool_rebalance": False,
    "enable_partial_reuse": ANY,
    "enable_swa_scratch_reuse": False,
    "event_buffer_max_size": 0,
    "free_gpu_memory_fraction": 0.9,
    "host_cache_size": None,
    "iteration_stats_interval": 1,
    "kv_cache_event_hash_algo": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "mamba_ssm_philox_rounds": 10,
    "mamba_ssm_stochastic_rounding": False,
    "mamba_state_cache_interval": 256,
    "max_attention_window": None,
    "max_gpu_total_bytes": 0,
    "max_util_for_resume": 0.95,
    "pool_ratio": None,
    "secondary_offload_min_priority": None,
    "sink_token_length": None,
    "use_kv_cache_manager_v2": False,
    "use_uvm": False,
}

CUDA_GRAPH_KEYS = (
    "batch_sizes", "enable_padding", "max_batch_size", "max_num_token", "max_seq_len", "mode", "num_tokens",
    "seq_lens",
)  # fmt: skip

LLM_OPTIONS: dict[str, object] = {
    "allreduce_strategy": "AUTO",
    "attention_dp_config": None,
    "attn_backend": "TRTLLM",
    "backend": "pytorch",
    "batch_wait_max_tokens_ratio": 0,
    "batch_wait_timeout_iters": 0,
    "batch_wait_timeout_ms": 0,
    "cache_transceiver_config": None,
    "checkpoint_format": None,
    "context_parallel_size": 1,
    "cp_config": None,
    "cuda_graph_config": {},
    "custom_tokenizer": None,
    "disable_flashinfer_sampling": False,
    "disable_overlap_scheduler": ANY,
    "dwdp_config": None,
    "enable_attention_dp": False,
    "enable_autotuner": ANY,
    "enable_chunked_prefill": ANY,
    "enable_early_first_token_response": False,
    "enable_energy_metrics": False,
    "enable_iter_perf_stats": False,
    "enable_iter_req_stats": False,
    "enable_layerwise_nvtx_marker": False,
    "enable_lm_head_tp_in_adp": False,
    "enable_lora": False,
    "enable_low_latency_host_dispatch": False,
    "enable_min_latency": False,
    "enable_resource_governor": False,
    "enable_speculative_beam_history_d2h": False,
    "encode_only": False,
    "encoder_max_batch_size": None,
    "encoder_max_num_tokens": None,
    "force_dynamic_quantization": False,
    "garbage_collection_gen0_threshold": ANY,
    "gather_generation_logits": False,
    "gms_config": {},
    "gpus_per_node": None,
    "guided_decoding_backend": None,
    "iter_stats_max_iterations": None,
    "kv_cache_compression_config": None,
    "kv_connector_config": None,
    "layer_wise_benchmarks_config": {},
    "load_format": "auto",
    "lora_config": None,
    "max_beam_width": 1,
    "max_input_len": None,
    "max_stats_len": 1000,
    "mm_encoder_only": False,
    "model_kwargs": None,
    "moe_cluster_parallel_size": None,
    "moe_config": {},
    "moe_expert_parallel_size": None,
    "moe_tensor_parallel_size": None,
    "multimodal_config": {},
    "mx_config": {},
    "num_postprocess_workers": 0,
    "nvfp4_gemm_config": {},
    "orchestrator_type": None,
    "otlp_traces_endpoint": None,
    "peft_cache_config": None,
    "perf_metrics_max_requests": 0,
    "pipeline_parallel_size": 1,
    "post_processor_hook": None,
    "postprocess_tokenizer_dir": None,
    "pp_partition": None,
    "print_iter_log": False,
    "prometheus_metrics_config": None,
    "ray_placement_config": None,
    "ray_worker_extension_cls": None,
    "ray_worker_nsight_options": None,
    "reasoning_parser": None,
    "reorder_policy_config": None,
    "request_stats_max_iterations": None,
    "return_perf_metrics": False,
    "revision": None,
    "sampler_force_async_worker": False,
    "sampler_type": "auto",
    "scheduler_config": {},
    "skip_tokenizer_init": False,
    "sleep_config": None,
    "sparse_attention_config": None,
    "stream_interval": 1,
    "telemetry_config": ANY,
    "tensor_parallel_size": 1,
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "tokenizer_revision": None,
    "torch_compile_config": None,
    "trust_remote_code": False,
    "use_cute_dsl_bf16_bmm": False,
    "use_cute_dsl_bf16_gemm": False,
    "use_cute_dsl_blockscaling_bmm": False,
    "use_cute_dsl_blockscaling_mm": False,
}

# Names of ours that a user may expect in the YAML, and what to write there instead.
_HINTS = {
    "tree_topk": "Write dynamic_tree_max_topK.",
    "num_steps": "Write max_draft_len.",
    "num_nodes": "Write max_total_draft_tokens, which is num_nodes - 1: it does not count the root.",
    "num_nextn_predict_layers": "Write max_draft_len.",
    "device": "Leave it out: the device is chosen on the command line or in Python.",
}


def known_keys(section: str, decoding_type: object = None) -> list[str]:
    """The legal keys of a section, sorted; "" is the top level of the file.

    A `speculative_config` has other keys for each of `DRAFTERS`; without one, the keys of all.
    """
    other = {"Eagle3": _MTP_OPTIONS, "MTP": _EAGLE3_OPTIONS}.get(str(decoding_type), {})
    spec = [key for key in (*SPECULATIVE_FIELDS, *SPECULATIVE_OPTIONS) if key not in other]
    fields = [key.rpartition(".") for key in ENGINE_FIELDS]
    named = [leaf for home, _, leaf in fields if home == section]
    tables: dict[str, Iterable[str]] = {
        "": (*SECTIONS, *LLM_OPTIONS),
        "kv_cache_config": KV_CACHE_OPTIONS,
        "speculative_config": spec,
        "cuda_graph_config": CUDA_GRAPH_KEYS,
    }
    return sorted({*named, *tables[section]})


def unknown_key_problems(
    section: str, mapping: Mapping[Any, object], decoding_type: object = None
) -> list[Problem]:
    """One problem for each key that TensorRT-LLM does not know in this section.

    The remedy is our own hint, the section where the key is known, or the nearest key that is known here.

    Args:
        section: "", kv_cache_config, speculative_config or cuda_graph_config.
        mapping: keys and values as read.
        decoding_type: of a speculative_config.
    """
    known = known_keys(section, decoding_type)
    prefix, where = (f"{section}.", section) if section else ("", "LLM arguments")
    if decoding_type in DRAFTERS:
        where = f"{decoding_type}DecodingConfig"
    return [
        Problem(
            f"{prefix}{key}",
            value,
            f"is not a key of TensorRT-LLM's {where}",
            _remedy(str(key), section, known),
        )
        for key, value in mapping.items()
        if key not in known
    ]


def _remedy(key: str, section: str, known: list[str]) -> str:
    if key in _HINTS:
        return _HINTS[key]
    for home in ("speculative_config", "kv_cache_config", ""):
        if key in known_keys(home):
            if home == section:
                return "Remove it: another decoding_type has it."
            return f"Move it under {home}." if home else "Move it to the top level."
    lowered = {name.lower(): name for name in known}
    near = get_close_matches(key.lower(), lowered, n=1)
    return f"Did you mean {lowered[near[0]]}?" if near else "Remove it."
