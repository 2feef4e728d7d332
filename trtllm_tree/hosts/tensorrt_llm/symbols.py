"""Every TensorRT-LLM symbol that this host uses, as data: where it lived and lives, and what is passed to it.

Read in TensorRT-LLM's source: the 1.4 line, and late 1.3 release candidates under their older module paths. What
only exists on instances (`spec_worker`, `kv_lens_cuda`, `py_seq_slot`) cannot be looked up on a class and is not
here. Must not import TensorRT-LLM, and must not know how a symbol is checked: that is the probe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["value", "call", "override", "fields", "model"]


@dataclass(frozen=True)
class Feature:
    """Something that works if all its symbols do.

    Attributes:
        id: its name in reports.
        what: what it gives.
        needs: features without which it is of no use.
    """

    id: str
    what: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Symbol:
    """One name, and how this host uses it.

    Attributes:
        feature: id of the feature that it belongs to.
        kind: `call`: we call it, or construct the class. `override`: we override it and are called. `fields`: we
            read attributes of the class's instances. `model`: a target class that we subclass. `value`: we only need
            it to be there.
        modules: where it may be, newest first.
        name: in the module.
        member: of the class `name`; "new|old" where it was renamed, empty for the class itself.
        parameters: what we pass, are passed, or read. "new|old" where it was renamed; "name?" where it may be absent.
        positional: further arguments that we pass by position.
        purpose: what for.
    """

    feature: str
    kind: Kind
    modules: tuple[str, ...]
    name: str
    member: str = ""
    parameters: tuple[str, ...] = ()
    positional: int = field(default=0, kw_only=True)
    purpose: str = field(kw_only=True)

    @property
    def id(self) -> str:
        """Its name in reports and in code, independent of modules: unique together with the feature."""
        return ".".join(filter(None, (self.name, self.member.partition("|")[0])))


_TREE_PARTS = ("tree_config", "model_registry", "worker", "slots", "fmha", "kv_compaction")
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseekv3",
    "GptOssForCausalLM": "gpt_oss",
    "NemotronHForCausalLM": "nemotron_h",
    "Glm4MoeForCausalLM": "glm",
}
# What an architecture needs besides trees.
_LAYERS = {"DeepseekV3ForCausalLM": "mla", "NemotronHForCausalLM": "hybrid"}
# Those whose MTP layer drafts.
_MTP_OWNERS = ("Glm4MoeForCausalLM", "NemotronHForCausalLM")

# The feature that a tree needs, by TensorRT-LLM's decoding_type.
TREE_FEATURES = {"Eagle3": "trees", "MTP": "mtp"}

FEATURES = (
    Feature("chain", "Eagle3 as a chain, in TensorRT-LLM's own worker"),
    Feature("llm_api", "speculative_config objects in tensorrt_llm.LLM", ("chain",)),
    Feature("serve", "trtllm-serve's entry point"),
    Feature("drafter", "the documented Drafter: best path as a chain"),
    Feature("tree_config", "tree options in an Eagle3 config"),
    Feature("model_registry", "own model classes in every rank"),
    Feature("worker", "own worker: verify, accepted path, lanes"),
    Feature("slots", "next round's parents and seeds, by slot"),
    Feature("fmha", "own attention library"),
    Feature("kv_compaction", "views of the KV pools"),
    Feature("trees", "draft trees", _TREE_PARTS),
    Feature("mla", "draft trees over latent attention", ("trees",)),
    Feature("mtp", "draft trees from MTP layers", ("trees",)),
    Feature("hybrid", "draft trees over recurrent layers", ("trees",)),
    *(
        Feature(f"model:{name}", f"draft trees on {name}", (_LAYERS.get(name, "trees"),))
        for name in _ARCHITECTURES
    ),
    *(Feature(f"mtp:{name}", f"draft trees from the MTP layer of {name}", ("mtp",)) for name in _MTP_OWNERS),
)

_ROOT = "tensorrt_llm"
_TORCH = f"{_ROOT}._torch"
_LLM_ARGS = (f"{_ROOT}.llmapi.llm_args",)
_EAGLE3 = (f"{_TORCH}.speculative.eagle3",)
_MTP_WORKER = (*_EAGLE3, f"{_TORCH}.speculative.mtp")
_INTERFACE = (f"{_TORCH}.speculative.interface",)
_TREE_MANAGER = (f"{_TORCH}.speculative.spec_tree_manager",)
_DRAFTER = (f"{_TORCH}.speculative.drafter",)
_MODELS = f"{_TORCH}.models"
_RESOURCES = (f"{_TORCH}.pyexecutor.resource_manager",)
# Base of the models that own a worker; others cannot be given ours.
WORKER_OWNER = "SpecDecOneEngineForCausalLM"


def _attention(name: str) -> tuple[str, ...]:
    return f"{_TORCH}.attention.backends.{name}", f"{_TORCH}.attention_backend.{name}"


def _executor_cache(name: str) -> tuple[str, ...]:
    return f"{_TORCH}.pyexecutor.kv_cache.{name}", f"{_TORCH}.pyexecutor.{name}"


_FMHA = _attention("fmha.interface")
_REGISTRY = _attention("fmha.registry")
_ATTENTION_CALL = ("q", "k", "v", "metadata", "forward_args")
_WORKER_CALL = (
    "input_ids", "position_ids", "hidden_states", "logits", "attn_metadata", "spec_metadata", "draft_model",
    "resource_manager",
)  # fmt: skip
_MODEL_CALL = (
    "attn_metadata", "input_ids", "position_ids", "inputs_embeds", "return_context_logits", "spec_metadata",
    "resource_manager",
)  # fmt: skip
_MTP_CALL = ("input_ids", "position_ids", "hidden_states", "embed_tokens", "attn_metadata")
_SPEC_METADATA = ("runtime_draft_len", "hidden_states", "layers_to_capture", "hidden_size")
_FORWARD_ARGS = (
    "output", "out_scale", "attention_input_type", "attention_window_size", "attention_sinks", "attention_mask_data",
)  # fmt: skip
_ATTENTION_METADATA = (
    "use_spec_decoding", "is_spec_dec_tree", "is_spec_dec_dynamic_tree", "spec_decoding_position_offsets",
    "spec_decoding_packed_mask", "spec_decoding_generation_lengths", "kv_cache_block_offsets",
    "draft_kv_cache_block_offsets", "tokens_per_block", "host_kv_cache_pool_mapping", "host_kv_cache_pool_pointers",
    "effective_workspace",
)  # fmt: skip
_MAMBA_UPDATE = ("attn_metadata", "num_accepted_tokens", "state_indices", "accepted_leaf_positions")

# fmt: off
SYMBOLS: tuple[Symbol, ...] = (
    Symbol("chain", "fields", _LLM_ARGS, "Eagle3DecodingConfig", "",
           ("max_draft_len", "speculative_model|speculative_model_dir"), purpose="a chain is its plain instance"),
    Symbol("llm_api", "call", (_ROOT,), "LLM", "", ("model", "speculative_config"), purpose="LLM(host=...)"),
    Symbol("llm_api", "fields", (_ROOT,), "SamplingParams", "",
           ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
            "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "min_tokens", "bad"), purpose="LLM(host=...)"),
    Symbol("llm_api", "fields", _LLM_ARGS, "TorchLlmArgs", "",
           ("speculative_config", "attn_backend", "env_overrides"), purpose="what a YAML file sets"),
    Symbol("serve", "value", (f"{_ROOT}.commands.serve",), "main", purpose="trtllm-tree serve"),
    Symbol("drafter", "fields", _LLM_ARGS, "UserProvidedDecodingConfig", "",
           ("drafter", "resource_manager", "max_draft_len"), purpose="carries a Drafter"),
    Symbol("drafter", "call", _DRAFTER, "Drafter", "",
           ("max_draft_len?", "max_total_draft_tokens?", "max_concurrency"), purpose="base class"),
    Symbol("drafter", "override", _DRAFTER, "Drafter", "prepare_draft_tokens",
           ("scheduled_requests", "resource_manager"), purpose="drafts"),
    Symbol("tree_config", "fields", _LLM_ARGS, "Eagle3DecodingConfig", "",
           ("use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens"), purpose="K and N"),
    Symbol("model_registry", "call", (f"{_MODELS}.modeling_utils",), "register_auto_model", "", ("name",),
           purpose="puts our subclass under an architecture"),
    Symbol("model_registry", "override", (f"{_MODELS}.modeling_speculative",), WORKER_OWNER, "forward", _MODEL_CALL,
           purpose="positions of unfused RoPE"),
    Symbol("worker", "call", _EAGLE3, "Eagle3OneModelWorker", "",
           ("spec_config", "mapping", "use_separate_draft_kv_cache"), purpose="base class"),
    Symbol("worker", "override", _EAGLE3, "Eagle3OneModelWorker", "_forward_impl|forward", _WORKER_CALL,
           purpose="one round"),
    Symbol("worker", "call", _INTERFACE, "SpecWorkerBase", "get_draft_kv_cache_manager", ("resource_manager",),
           purpose="the head's KV"),
    Symbol("worker", "call", _INTERFACE, "SpecWorkerBase", "draft_kv_cache_context",
           ("attn_metadata", "draft_kv_cache_manager"), purpose="the head's KV"),
    Symbol("worker", "fields", _EAGLE3, "Eagle3OneModelSpecMetadata", "", _SPEC_METADATA, purpose="what is verified"),
    Symbol("worker", "fields", _RESOURCES, "ResourceManagerType", "", ("SPEC_RESOURCE_MANAGER",),
           purpose="finds the slots"),
    Symbol("worker", "call", _RESOURCES, "ResourceManager", "get_resource_manager", positional=1,
           purpose="finds the slots"),
    Symbol("worker", "call", _attention("interface"), "AttentionMetadata", "on_update",
           purpose="after lengths changed"),
    Symbol("slots", "fields", _TREE_MANAGER, "SpecTreeManager", "", ("slot_storage",), purpose="is replaced by ours"),
    Symbol("slots", "call", _TREE_MANAGER, "DynamicTreeSlotStorage", "",
           ("num_slots", "n_dt", "mask_width"), purpose="base class"),
    Symbol("slots", "override", _TREE_MANAGER, "DynamicTreeSlotStorage", "fill_all_slot_ids",
           ("context_requests", "generation_requests"), purpose="uploads seeds"),
    Symbol("slots", "override", _TREE_MANAGER, "DynamicTreeSlotStorage", "mark_invalid", ("slot_id",),
           purpose="a slot without a tree is a chain"),
    Symbol("fmha", "value", _REGISTRY, "FMHA_LIBS", purpose="registration"),
    Symbol("fmha", "value", _REGISTRY, "DEFAULT_FMHA_LIBS", purpose="the libraries behind ours"),
    Symbol("fmha", "call", _REGISTRY, "get_enabled_fmha_lib_classes", purpose="says which one is active"),
    Symbol("fmha", "call", _FMHA, "Fmha", "", ("attn",), purpose="base class"),
    Symbol("fmha", "override", _FMHA, "Fmha", "_is_available|is_available", ("attn",), purpose="which layers"),
    Symbol("fmha", "override", _FMHA, "Fmha", "_is_supported|is_supported", (*_ATTENTION_CALL, "phase?"),
           purpose="which calls"),
    Symbol("fmha", "override", _FMHA, "Fmha", "forward", _ATTENTION_CALL, purpose="tree, lane or plain"),
    Symbol("fmha", "fields", _attention("interface"), "AttentionForwardArgs", "", _FORWARD_ARGS,
           purpose="one attention call"),
    Symbol("fmha", "fields", _attention("trtllm"), "TrtllmAttentionMetadata", "", _ATTENTION_METADATA,
           purpose="the batch"),
    Symbol("kv_compaction", "call", _RESOURCES, "KVCacheManager", "get_buffers", ("layer_idx", "kv_layout"),
           purpose="rows of a layer"),
    Symbol("kv_compaction", "call", (*_executor_cache("kv_cache_manager_v2"), *_RESOURCES), "KVCacheManagerV2",
           "get_buffers", ("layer_idx", "kv_layout"), purpose="rows of a layer"),
    Symbol("mla", "fields", _attention("trtllm"), "TrtllmAttentionMetadata", "", ("helix_position_offsets",),
           purpose="positions of latent rows"),
    Symbol("mla", "fields", _attention("interface"), "AttentionForwardArgs", "", ("quant_q_buffer",),
           purpose="queries over an FP8 cache"),
    Symbol("mtp", "fields", _LLM_ARGS, "MTPDecodingConfig", "",
           ("use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens", "max_draft_len"), purpose="K and N"),
    Symbol("mtp", "call", _MTP_WORKER, "MTPEagleWorker", "",
           ("spec_config", "model_config", "use_separate_draft_kv_cache", "mapping?"), purpose="base class"),
    Symbol("mtp", "override", _MTP_WORKER, "MTPEagleWorker", "_forward_impl|forward", _WORKER_CALL,
           purpose="one round"),
    Symbol("mtp", "value", (f"{_TORCH}.speculative.mtp_dynamic_tree",), "MTPEagleDynamicTreeResourceManager",
           purpose="holds the slots"),
    Symbol("mtp", "fields", _INTERFACE, "SpecMetadata", "", ("runtime_draft_len",), purpose="what is verified"),
    Symbol("mtp", "value", (f"{_MODELS}.modeling_speculative",), "MTPForCausalLM",
           purpose="the layer, and the target's scores and embeddings"),
    Symbol("mtp:Glm4MoeForCausalLM", "call", (f"{_MODELS}.modeling_glm",), "Glm4MTP", "forward", _MTP_CALL,
           purpose="a draft forward"),
    Symbol("mtp:NemotronHForCausalLM", "call", (f"{_MODELS}.modeling_nemotron_h",), "NemotronHMTP", "forward",
           _MTP_CALL, purpose="a draft forward"),
    Symbol("mtp", "call", (f"{_MODELS}.modeling_deepseekv3",), "DeepseekV3MTPHead", "forward",
           ("lm_head", "attn_metadata", "return_context_logits"), positional=1, purpose="scores of draft rows"),
    Symbol("mtp", "call", (f"{_TORCH}.distributed.ops",), "allgather", "", ("mapping", "dim"), positional=1,
           purpose="scores that are sharded over ranks"),
    Symbol("hybrid", "call", _executor_cache("mamba_cache_manager"), "MambaCacheManager", "update_mamba_states",
           _MAMBA_UPDATE, purpose="states follow the accepted path"),
    Symbol("hybrid", "override", _TREE_MANAGER, "DynamicTreeSlotStorage", "next_links_from_slots",
           ("slot_ids", "count"), purpose="a tree as recurrent layers read it"),
    Symbol("hybrid", "fields", _EAGLE3, "Eagle3OneModelSpecMetadata", "",
           ("retrieve_next_token", "retrieve_next_sibling"), purpose="what recurrent layers read of a tree"),
    *(Symbol(f"model:{name}", "model", (f"{_MODELS}.modeling_{module}",), name, "", ("model_config",),
             purpose="target") for name, module in _ARCHITECTURES.items()),
)
# fmt: on
