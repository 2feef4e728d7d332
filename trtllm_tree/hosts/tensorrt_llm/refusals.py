"""Everything that keeps a rank from running draft trees, in one report: what it sees of a run, put to our own rules.

A model's constructor sees the target's config, quantisation, mapping and decoding config; page size, windows, beams
and connectors show in the KV manager, at the first call. What is seen is read into a `RunConfig`, which config and
support judge as they judge a file; no rule is kept here. Reads attributes only: must not import TensorRT-LLM or torch.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_tree.config.engine import EngineConfig, kv_cache_dtype_problems
from trtllm_tree.config.host_rules import TREE_REFUSALS, VERIFY_VARIABLE, host_problems
from trtllm_tree.config.keys import DRAFTERS
from trtllm_tree.config.load import RunConfig
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.errors import ConfigError, Problem
from trtllm_tree.hosts.tensorrt_llm.translate import other_options, plain_config
from trtllm_tree.support.head import GROUPED_HEADS_RULE, SEES_EVERY_KEY_RULE
from trtllm_tree.support.kv_scales import kv_scale_problems
from trtllm_tree.support.leaf_rules import Capability
from trtllm_tree.support.model_facts import ModelFacts, model_facts, read_model_facts
from trtllm_tree.support.mtp_weights import mtp_weight_problems
from trtllm_tree.support.plan import PlannedRun, run_problems

# Options that the constructor sees: their name in a file, where they are, and what is not set.
_MODEL_OPTIONS = ("attn_backend", "lora_config", "sparse_attention_config", "kv_cache_compression_config")
_MAPPING_OPTIONS = {
    "pipeline_parallel_size": "pp_size",
    "context_parallel_size": "cp_size",
    "enable_attention_dp": "enable_attention_dp",
}
# How a manager is told which node's recurrent state is kept, and what makes it keep none.
_LEAF, _REPLAY_VARIABLE = "accepted_leaf_positions", "TRTLLM_USE_MAMBA_REPLAY"


def refusals(
    model_config: Any,
    spec_config: Any,
    mapping: Any,
    *,
    verify: str | None = None,
    capability: Capability | None = None,
) -> list[Problem]:
    """Every reason that a model's constructor can see; empty where trees can run, as far as it sees.

    Args:
        model_config: TensorRT-LLM's ModelConfig of the target.
        spec_config: its decoding config, an effective dynamic tree.
        mapping: its Mapping.
        verify: how drafts are accepted; None where TLLM_TREE_VERIFY decides.
        capability: of this rank's GPU; None where there is none.
    """
    problems: list[Problem] = []
    pretrained = model_config.pretrained_config
    config = RunConfig(
        engine=EngineConfig(model=_directory(pretrained), kv_cache_dtype=_kv_dtype(model_config, problems)),
        speculative=_speculative(spec_config, problems),
        env_overrides=_environment(verify),
        extra=_options(model_config, mapping),
    )
    target, head = _target_facts(model_config, mapping), _head(config)
    draft = None if head is None else read_model_facts(Path(head))
    run = PlannedRun(config=config, host="tensorrt_llm", target=target, draft=draft, capability=capability)
    problems += host_problems(config, "tensorrt_llm") + run_problems(run) + _head_problems(draft)
    problems += _mtp_problems(config, target)
    if config.engine.kv_cache_dtype == "fp8":
        folders = (("model", config.engine.model), ("speculative_model", head))
        for option, folder in folders:
            problems += kv_scale_problems(Path(folder), option) if folder and Path(folder).is_dir() else []
    return _once(problems)


def runtime_refusals(kv_cache_manager: Any) -> list[Problem]:
    """Every reason that only the KV manager shows, at the first call of a worker."""
    problems: list[Problem] = []
    page = getattr(kv_cache_manager, "tokens_per_block", None)
    try:
        EngineConfig.from_trtllm({"kv_cache_config": {"tokens_per_block": page}})
    except ConfigError as error:
        problems += error.problems
    found: dict[str, object] = {}
    if (getattr(kv_cache_manager, "max_beam_width", None) or 1) > 1:
        found["max_beam_width"] = kv_cache_manager.max_beam_width
    windows = list(getattr(kv_cache_manager, "max_attention_window_vec", None) or [])
    longest = getattr(kv_cache_manager, "max_seq_len", None)
    # None sees everything, and a layer of recurrent states has a number below 0.
    if longest is not None and any(window is not None and 0 <= window < longest for window in windows):
        found["kv_cache_config.max_attention_window"] = windows
    if getattr(kv_cache_manager, "kv_connector_manager", None) is not None:
        found["kv_connector_config"] = type(kv_cache_manager.kv_connector_manager).__name__
    return [
        *problems,
        *(
            Problem(option, value, TREE_REFUSALS[option], f"Remove {option.rpartition('.')[2]}.")
            for option, value in found.items()
        ),
        *_state_problems(kv_cache_manager),
    ]


def guided_decoding_refusal() -> Problem:
    """Why a worker takes no guided decoder."""
    option = "guided_decoding_backend"
    return Problem(option, "set", TREE_REFUSALS[option], f"Remove {option}.")


def _state_problems(kv_cache_manager: Any) -> list[Problem]:
    """What keeps the recurrent states of a hybrid's manager from following a tree."""
    update = getattr(kv_cache_manager, "update_mamba_states", None)
    if update is None:
        return []
    problems = []
    if _LEAF not in inspect.signature(update).parameters:
        option = f"{type(kv_cache_manager).__name__}.update_mamba_states"
        rule = f"parameter {_LEAF} is missing, without which recurrent states follow a chain only"
        remedy = "Use a TensorRT-LLM of the 1.4 line, or tree_topk=1 (a chain)."
        problems.append(Problem(option, str(inspect.signature(update)), rule, remedy))
    if getattr(kv_cache_manager, "use_replay_state_update", False):
        rule = "replayed recurrent states follow a chain only"
        remedy = f'Set {_REPLAY_VARIABLE}: "0" in env_overrides.'
        problems.append(Problem(_REPLAY_VARIABLE, os.environ.get(_REPLAY_VARIABLE), rule, remedy))
    return problems


def _speculative(spec_config: Any, problems: list[Problem]) -> SpeculativeConfig:
    try:
        return plain_config(spec_config)
    except ConfigError as error:
        problems += error.problems
    kind = spec_config.decoding_type if spec_config.decoding_type in DRAFTERS else "Eagle3"
    head, kept = getattr(spec_config, "speculative_model", None), other_options(spec_config)
    # A tree whose sizes are right, for what is to be judged besides.
    return SpeculativeConfig(
        tree_topk=2,
        num_steps=2,
        decoding_type=kind,
        speculative_model=str(head) if head else None if kind == "MTP" else "unknown",
        host_options=kept,
    )


def _environment(verify: str | None) -> dict[str, str]:
    """The plugin's variables in this process."""
    found = {name: value for name, value in os.environ.items() if name.startswith("TLLM_")}
    return found if verify is None else found | {VERIFY_VARIABLE: verify}


def _options(model_config: Any, mapping: Any) -> dict[str, object]:
    found = {name: getattr(model_config, name, None) for name in _MODEL_OPTIONS}
    found |= {option: getattr(mapping, name, None) for option, name in _MAPPING_OPTIONS.items()}
    return {option: value for option, value in found.items() if value is not None}


def _kv_dtype(model_config: Any, problems: list[Problem]) -> str:
    """The cache's dtype as a file says it. TensorRT-LLM keeps it as a quantisation of the model."""
    quantisation = getattr(model_config, "quant_config", None)
    algo = getattr(quantisation, "kv_cache_quant_algo", None)
    name = "auto" if algo is None else str(getattr(algo, "value", algo)).lower()
    found = kv_cache_dtype_problems(name, "kv_cache_config.dtype")
    problems += found
    return "auto" if found else name


def _directory(pretrained: Any) -> str:
    """Where the target was read from, as far as its config knows."""
    return str(getattr(pretrained, "name_or_path", "") or "")


def _target_facts(model_config: Any, mapping: Any) -> ModelFacts:
    """Of one rank's share of the heads, in the dtype in which it computes: it may be another than its checkpoint's."""
    pretrained = model_config.pretrained_config
    facts = model_facts(pretrained.to_dict() if hasattr(pretrained, "to_dict") else vars(pretrained))
    dtype = getattr(model_config, "torch_dtype", None)
    if dtype is not None:
        facts = replace(facts, dtype=str(dtype).removeprefix("torch."))
    ranks = getattr(mapping, "tp_size", 1)
    heads, kv_heads = facts.num_heads, facts.num_kv_heads
    if heads is None or kv_heads is None or ranks == 1:
        return facts
    return replace(facts, num_heads=max(heads // ranks, 1), num_kv_heads=max(kv_heads // ranks, 1))


def _head(config: RunConfig) -> str | None:
    """The draft head's directory; MTP layers are the target's, and of its kind."""
    spec = config.speculative
    return None if spec is None or spec.decoding_type == "MTP" else spec.speculative_model


def _mtp_problems(config: RunConfig, target: ModelFacts) -> list[Problem]:
    """What the checkpoint lacks of an MTP layer that drafts, where this rank knows its folder."""
    spec, folder = config.speculative, Path(config.engine.model)
    if spec is None or spec.decoding_type != "MTP":
        return []
    is_there = bool(config.engine.model) and (folder / "config.json").is_file()
    return mtp_weight_problems(folder, target, "tensorrt_llm") if is_there else []


def _head_problems(facts: ModelFacts | None) -> list[Problem]:
    """What a head's layers must not be, as far as its config.json tells."""
    if facts is None:
        return []
    found = (
        ("kv_lora_rank", facts.value_dim, GROUPED_HEADS_RULE),
        ("sliding_window", facts.sliding_window, SEES_EVERY_KEY_RULE),
    )
    return [
        Problem(f"speculative_model: {name}", value, rule, "Use another head.")
        for name, value, rule in found
        if value
    ]


def _once(problems: Iterable[Problem]) -> list[Problem]:
    """Without repetitions: a wrong value may be seen in two places."""
    return list({(problem.option, problem.rule): problem for problem in problems}.values())
