"""What only one host demands of a config: refusals by name, so that no option is silently ignored.

Rules that hold everywhere are in the config classes; what depends on a model or on hardware is in support.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from trtllm_tree.config.engine import kv_cache_dtype_problems
from trtllm_tree.config.keys import ANY, KV_CACHE_OPTIONS, LLM_OPTIONS, SPECULATIVE_OPTIONS
from trtllm_tree.config.load import RunConfig
from trtllm_tree.config.speculative import TRTLLM_MAX_NODES, SpeculativeConfig
from trtllm_tree.config.tree_rules import clamp
from trtllm_tree.errors import Problem

Host = Literal["embedded", "tensorrt_llm"]
HOSTS: tuple[str, ...] = get_args(Host)

STATIC_TREE_RULE = "static trees are not drafted here"
EMBEDDED_RULE = "the embedded host does not honour it"
# Values that the embedded host has a meaning for.
_EMBEDDED_VALUES = {"guided_decoding_backend": "xgrammar", "speculative_config.enable_penalty": True}
_EMBEDDED_REMEDIES = {
    "guided_decoding_backend": "Set guided_decoding_backend to xgrammar.",
    "kv_cache_config.free_gpu_memory_fraction": "Size the pool with kv_cache_config.max_tokens instead.",
    "kv_cache_config.enable_block_reuse": "Set enable_block_reuse to false.",
    "max_input_len": "Limit requests with max_seq_len instead.",
}

# What a draft tree does not go with on TensorRT-LLM, on its side or on ours; support/scope.py shows it.
TREE_REFUSALS = {
    "cache_transceiver_config": "there is no prefill/decode disaggregation with draft trees",
    "context_parallel_size": "there is no context parallelism with draft trees",
    "cp_config": "there is no context parallelism with draft trees",
    "enable_attention_dp": "there is no attention data parallelism with draft trees",
    "enable_lora": "there is no LoRA with draft trees",
    "guided_decoding_backend": "there is no structured output with draft trees",
    "kv_cache_compression_config": "tree attention reads caches as they were written",
    "kv_cache_config.max_attention_window": "target layers have no sliding window with draft trees",
    "kv_connector_config": "there is no KV connector with draft trees",
    "lora_config": "there is no LoRA with draft trees",
    "max_beam_width": "there is no beam search with draft trees",
    "pipeline_parallel_size": "there is no pipeline parallelism with draft trees",
    "sparse_attention_config": "there is no sparse attention with draft trees",
    "attn_backend": "tree attention is part of the TRTLLM backend",
    "speculative_config.acceptance_rate_window_size": "a tree is not switched off at run time",
    "speculative_config.acceptance_window": "a tree is not switched off at run time",
    "speculative_config.draft_len_schedule": "a tree has one size at all batch sizes",
    "speculative_config.enable_penalty": "logits of a tree are not edited on this host",
    "speculative_config.max_concurrency": "a tree has one size at all batch sizes",
    "speculative_config.eagle3_one_model": "draft trees need the one-model flow",
    "speculative_config.mtp_eagle_one_model": "draft trees need the one-model flow",
    "speculative_config.use_mtp_vanilla": "a tree's one MTP layer is run again for every step",
    "speculative_config.use_relaxed_acceptance_for_thinking": "a tree accepts what the target would have decoded",
    "speculative_config.sa_config": "a tree has one drafter",
}

# What the plugin reads in each process of TensorRT-LLM; hosts.tensorrt_llm acts by them.
ENABLE_VARIABLE = "TLLM_TREE_ENABLE"
VERIFY_VARIABLE = "TLLM_TREE_VERIFY"
LIBRARIES_VARIABLE = "TLLM_FMHA_LIBS"
# Greedy whatever a request asks; noise keyed by seed and position; recursive rejection.
VERIFY_MODES = ("greedy", "gumbel", "rejection")
DEFAULT_VERIFY_MODE = "gumbel"
ATTENTION_LIBRARY = "trtllm_tree"
# What switches trees on in every process, and makes TensorRT-LLM refuse to start where the plugin is missing.
TREE_ENVIRONMENT = {ENABLE_VARIABLE: "1", LIBRARIES_VARIABLE: f"+{ATTENTION_LIBRARY}"}


def host_problems(config: RunConfig, host: Host) -> list[Problem]:
    """Everything in `config` that `host` cannot honour; empty if it can run it."""
    assert host in HOSTS, f"unknown host {host!r}"
    options = dict(_set_options(config))
    problems = _head_missing(config)
    tree = config.speculative if config.speculative is not None and config.speculative.is_tree else None
    if host == "embedded" or tree is not None:
        problems += _head_not_used(config.speculative)
    if host == "embedded":
        problems += [
            _embedded_refusal(option, *pair)
            for option, pair in options.items()
            if option not in _EMBEDDED_VALUES or pair[0] != _EMBEDDED_VALUES[option]
        ]
        if tree is not None:
            rejection = tree.use_rejection_sampling
            problems += _embedded_mode_problems(config.env_overrides, rejection=rejection)
        return problems + kv_cache_dtype_problems(config.engine.kv_cache_dtype, "kv_cache_config.dtype")
    if "speculative_config.eagle_choices" in options:
        value, _ = options["speculative_config.eagle_choices"]
        remedy = "Set use_dynamic_tree to true."
        problems.append(Problem("speculative_config.eagle_choices", value, STATIC_TREE_RULE, remedy))
    if tree is not None:
        problems += trtllm_size_problems(tree)
        problems += environment_problems(config.env_overrides, rejection=tree.use_rejection_sampling)
        for option, rule in TREE_REFUSALS.items():
            if option in options:
                value, neutral = options[option]
                problems.append(Problem(option, value, rule, f"{_remove(option, neutral)}."))
        problems += kv_cache_dtype_problems(config.engine.kv_cache_dtype, "kv_cache_config.dtype")
    return problems


def _set_options(config: RunConfig) -> list[tuple[str, tuple[object, object]]]:
    """Kept options that ask for something: (name, (value, the value that asks for nothing))."""
    spec = config.speculative.host_options if config.speculative else {}
    kv = config.extra.get("kv_cache_config", {})
    top = {key: value for key, value in config.extra.items() if key != "kv_cache_config"}
    assert isinstance(kv, Mapping), "load_config keeps kv_cache_config as a mapping"
    tables = (("", top, LLM_OPTIONS), ("kv_cache_config.", kv, KV_CACHE_OPTIONS))
    return [
        (prefix + str(key), (value, neutral[key]))
        for prefix, values, neutral in (*tables, ("speculative_config.", spec, SPECULATIVE_OPTIONS))
        for key, value in values.items()
        if neutral[key] is not ANY and value != neutral[key]
    ]


def _embedded_refusal(option: str, value: object, neutral: object) -> Problem:
    remedy = _EMBEDDED_REMEDIES.get(option) or f"{_remove(option, neutral)}, or run on TensorRT-LLM."
    return Problem(option, value, EMBEDDED_RULE, remedy)


def _remove(option: str, neutral: object) -> str:
    name = option.rpartition(".")[2]
    return f"Remove {name}" if neutral in (None, {}) else f"Remove {name} or set it to {neutral}"


def _head_missing(config: RunConfig) -> list[Problem]:
    """A draft head is needed, except where the model brings its own: the demo, and MTP layers."""
    spec = config.speculative
    if spec is None or spec.speculative_model or spec.decoding_type == "MTP" or config.engine.model == "demo":
        return []
    rule, remedy = "Eagle3 needs a draft head", "Name its directory in speculative_config.speculative_model."
    return [Problem("speculative_config.speculative_model", None, rule, remedy)]


def _head_not_used(spec: SpeculativeConfig | None) -> list[Problem]:
    """An MTP layer drafts in place of a head."""
    if spec is None or spec.decoding_type != "MTP" or spec.speculative_model is None:
        return []
    rule = "MTP drafts with the target's own layer, not with a head"
    remedy = "Remove speculative_model, or set decoding_type to Eagle3."
    return [Problem("speculative_config.speculative_model", spec.speculative_model, rule, remedy)]


def demo_name_problems(config: RunConfig) -> list[Problem]:
    """The demo's names, which TensorRT-LLM would look for on the hub."""
    head = config.speculative.speculative_model if config.speculative else None
    names = (("model", config.engine.model), ("speculative_config.speculative_model", head))
    rule, remedy = "only the embedded host knows this name", "Give the directory."
    return [Problem(option, name, rule, remedy) for option, name in names if name == "demo"]


def environment_problems(environment: Mapping[str, str], *, rejection: bool) -> list[Problem]:
    """What is wrong with the plugin's variables for a tree, in a file's env_overrides or in a process.

    Args:
        rejection: the config asks for rejection sampling.
    """
    problems = _mode_problems(environment, rejection=rejection)
    libraries = environment.get(LIBRARIES_VARIABLE)
    named = [name.strip().removeprefix("+") for name in (libraries or "").split(",")]
    if environment.get(ENABLE_VARIABLE) == "1" and libraries is not None and ATTENTION_LIBRARY not in named:
        rule = f"names no {ATTENTION_LIBRARY}, so that TensorRT-LLM would start without tree attention"
        remedy = f'Set {LIBRARIES_VARIABLE} to "{TREE_ENVIRONMENT[LIBRARIES_VARIABLE]}".'
        problems.append(Problem(f"env_overrides.{LIBRARIES_VARIABLE}", libraries, rule, remedy))
    return problems


def _mode_problems(environment: Mapping[str, str], *, rejection: bool) -> list[Problem]:
    mode = environment.get(VERIFY_VARIABLE)
    if mode is not None and mode not in VERIFY_MODES:
        rule = f"must be one of {', '.join(VERIFY_MODES)}"
        remedy = f"Set {VERIFY_VARIABLE} to {DEFAULT_VERIFY_MODE}."
    elif rejection and mode not in (None, "rejection"):
        rule = "contradicts use_rejection_sampling = True"
        remedy = f"Set {VERIFY_VARIABLE} to rejection, or use_rejection_sampling to false."
    else:
        return []
    return [Problem(f"env_overrides.{VERIFY_VARIABLE}", mode, rule, remedy)]


def _embedded_mode_problems(environment: Mapping[str, str], *, rejection: bool) -> list[Problem]:
    """The embedded host verifies by the config and by each request's temperature: the variable may only agree."""
    mode = environment.get(VERIFY_VARIABLE)
    if problems := _mode_problems(environment, rejection=rejection):
        return problems
    if mode == "greedy":
        remedy = f"Set {VERIFY_VARIABLE} to {DEFAULT_VERIFY_MODE}, and send requests with temperature 0."
    elif mode == "rejection" and not rejection:
        remedy = "Set speculative_config.use_rejection_sampling to true."
    else:
        return []
    return [Problem(f"env_overrides.{VERIFY_VARIABLE}", mode, EMBEDDED_RULE, remedy)]


def trtllm_size_problems(spec: SpeculativeConfig) -> list[Problem]:
    """TensorRT-LLM's own bounds on a dynamic tree, S <= N - 1 <= K * S, and one mask word per node."""
    k, s, limit = spec.tree_topk, spec.num_steps, TRTLLM_MAX_NODES
    if spec.lane_window > limit:
        rule = f"(S - 1) * K = {spec.lane_window} <= N, but TensorRT-LLM trees have N <= {limit} nodes"
        remedy = f"Set dynamic_tree_max_topK to {limit // (s - 1)}."
        return [Problem("speculative_config.dynamic_tree_max_topK", k, rule, remedy)]
    total = spec.to_trtllm()["max_total_draft_tokens"]
    assert isinstance(total, int), "a tree writes its size"
    low, high = max(s, spec.lane_window - 1), min(k * s, limit - 1)
    remedy = f"Set max_total_draft_tokens to {clamp(total, low, high)} (num_nodes is one more)."
    rules = []
    if not s <= total <= k * s:
        rules.append(f"TensorRT-LLM wants S = {s} <= max_total_draft_tokens <= K * S = {k} * {s} = {k * s}")
    if total >= limit:
        rules.append(f"TensorRT-LLM trees have at most {limit} nodes with the root, this one {total + 1}")
    return [Problem("speculative_config.max_total_draft_tokens", total, rule, remedy) for rule in rules]
