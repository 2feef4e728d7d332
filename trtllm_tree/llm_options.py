"""The keyword arguments of `LLM`, read into a `RunConfig` as a file is: nothing is ignored, all problems come at once.

Must not know what a host makes of them: that is config/host_rules.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.keys import (
    ENGINE_FIELDS,
    KV_CACHE_OPTIONS,
    LLM_OPTIONS,
    SECTIONS,
    unknown_key_problems,
)
from trtllm_tree.config.load import RunConfig, read_environment
from trtllm_tree.config.option_names import unknown_option_problems
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.errors import ConfigError, Problem
from trtllm_tree.hosts.tensorrt_llm.llm import run_config
from trtllm_tree.hosts.tensorrt_llm.translate import plain_config

_SPECULATION = tuple(item.name for item in fields(SpeculativeConfig) if item.init)
_OPTIONS = sorted(
    {item.name for item in fields(EngineConfig)} | {*LLM_OPTIONS, *SECTIONS, "host", "speculative_config"}
)
# What Python calls a key of a file.
_PYTHON_NAMES = {key: name for key, name in ENGINE_FIELDS.items() if key != name} | {
    "speculative_config.speculative_model": "speculative_model"
}


def read_options(model: Any, speculative: Any, options: Mapping[str, Any], *, dtype: str) -> RunConfig:
    """What `LLM(model, speculative_config=..., dtype=..., **options)` asks for.

    Raises:
        ConfigError: with every option that nobody knows, or whose value is wrong.
    """
    problems = _unknown(options)
    known = {name: value for name, value in options.items() if name in _OPTIONS}
    known |= _spread_kv_cache(known, problems)
    if "env_overrides" in known:
        known["env_overrides"] = _environment(known["env_overrides"], problems)
    spec = None
    try:
        spec = read_speculative(speculative)
    except ConfigError as error:
        problems += error.problems
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    try:
        config = run_config(model, spec, known, dtype=dtype)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return config


def read_speculative(value: Any) -> SpeculativeConfig | None:
    """A `SpeculativeConfig`, a decoding config of TensorRT-LLM, or a mapping with the keys of a file's section.

    Raises:
        ConfigError: it is none of these, or something in it is wrong.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return SpeculativeConfig.from_trtllm(value)
    if isinstance(value, (str, type)) or not hasattr(value, "decoding_type"):
        rule = (
            f"must be a SpeculativeConfig or a mapping with TensorRT-LLM's keys, is a {type(value).__name__}"
        )
        remedy = "Pass SpeculativeConfig(speculative_model=..., tree_topk=...)."
        raise ConfigError(Problem("speculative_config", value, rule, remedy))
    return plain_config(value)


def in_python_names(problem: Problem) -> Problem:
    """A problem with the keys of a file as the arguments are called."""
    option, rule, remedy = problem.option, problem.rule, problem.remedy
    for key, name in _PYTHON_NAMES.items():
        option = name if option == key else option
        rule, remedy = rule.replace(key, name), remedy.replace(key, name)
    return replace(problem, option=option, rule=rule, remedy=remedy)


def _unknown(options: Mapping[str, Any]) -> list[Problem]:
    """Options that `LLM` does not know; those of a tree have a home of their own."""
    problems = unknown_option_problems("LLM", _OPTIONS, options)
    remedy = "Set it in speculative_config=SpeculativeConfig(...)."
    return [replace(each, remedy=remedy) if each.option in _SPECULATION else each for each in problems]


def _spread_kv_cache(options: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """`kv_cache_config` without the keys that have an argument of their own, and these arguments."""
    section = options.pop("kv_cache_config", None)
    if section is None:
        return {}
    if hasattr(section, "model_dump"):
        # TensorRT-LLM's KvCacheConfig.
        section = section.model_dump(exclude_unset=True)
    if not isinstance(section, Mapping):
        rule, remedy = f"must be a mapping, is a {type(section).__name__}", "Pass a dict of its keys."
        problems.append(Problem("kv_cache_config", section, rule, remedy))
        return {}
    problems += unknown_key_problems("kv_cache_config", section)
    spread: dict[str, Any] = {}
    for key, value in section.items():
        name = ENGINE_FIELDS.get(f"kv_cache_config.{key}")
        if name is None or value is None:
            continue
        spread[name] = value
        if name in options:
            rule = f"is {name}, which is given too"
            problems.append(Problem(f"kv_cache_config.{key}", value, rule, "Remove one of them."))
    if kept := {key: value for key, value in section.items() if key in KV_CACHE_OPTIONS}:
        spread["kv_cache_config"] = kept
    return spread


def _environment(variables: Any, problems: list[Problem]) -> dict[str, str]:
    if isinstance(variables, Mapping):
        return read_environment(variables, problems)
    if variables is not None:
        rule = f"must be a mapping, is a {type(variables).__name__}"
        problems.append(Problem("env_overrides", variables, rule, "Pass a dict of strings."))
    return {}
