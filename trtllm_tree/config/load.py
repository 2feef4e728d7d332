"""From a YAML file with TensorRT-LLM's own keys to a `RunConfig`; all errors of the file come at once.

The only place that reads config files. A key of TensorRT-LLM that this package has no field for is kept: that
host receives it, and host_rules.py refuses it where it cannot be honoured. An unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.keys import (
    ENGINE_FIELDS,
    KV_CACHE_OPTIONS,
    LLM_OPTIONS,
    SECTIONS,
    SPECULATIVE_OPTIONS,
    known_keys,
    unknown_key_problems,
)
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One config file, read.

    Args:
        engine: model and limits.
        speculative: None decodes plainly.
        env_overrides: environment variables for the processes of the host.
        extra: keys of TensorRT-LLM alone, as written; those of kv_cache_config under that name.
        written: fields of `engine` that were written, and are not our defaults.
    """

    engine: EngineConfig
    speculative: SpeculativeConfig | None = None
    env_overrides: dict[str, str] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)
    written: frozenset[str] = field(default=frozenset(), compare=False)


def load_config(path: str | Path, *, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read and validate a YAML file.

    Args:
        path: the file.
        overrides: the same keys, merged over the file's section by section; here `device` is allowed too.

    Raises:
        ConfigError: with every problem of the file.
    """
    config, problems = read_config(path, overrides=overrides)
    if problems:
        raise ConfigError(problems)
    return config


def read_config(
    path: str | Path, *, overrides: Mapping[str, Any] | None = None
) -> tuple[RunConfig, list[Problem]]:
    """As `load_config`, but hands the problems back, and what could be read beside them.

    A part with problems keeps only what can be checked further, so that one run of `check` finds everything.
    """
    problems: list[Problem] = []
    overrides = dict(overrides or {})
    device = overrides.pop("device", None) or "auto"
    content = _merged(_read_yaml(Path(path), problems), overrides)
    sections = {name: _section(content, name, problems) for name in SECTIONS}
    problems += unknown_key_problems("", content)
    problems += unknown_key_problems("kv_cache_config", sections["kv_cache_config"])
    problems += unknown_key_problems("cuda_graph_config", sections["cuda_graph_config"])

    model = content.get("model")
    engine = EngineConfig(model=model if isinstance(model, str) else "")
    try:
        engine = EngineConfig.from_trtllm(content, device=device)
    except ConfigError as error:
        problems += error.problems
    speculative = None
    if isinstance(content.get("speculative_config"), Mapping):
        try:
            speculative = SpeculativeConfig.from_trtllm(sections["speculative_config"])
        except ConfigError as error:
            problems += error.problems
            speculative = _salvaged(sections["speculative_config"])
    extra = {str(key): value for key, value in content.items() if key in LLM_OPTIONS}
    kept = {str(key): value for key, value in sections["kv_cache_config"].items() if key in KV_CACHE_OPTIONS}
    if kept:
        extra["kv_cache_config"] = kept
    environment = read_environment(sections["env_overrides"], problems)
    config = RunConfig(
        engine=engine,
        speculative=speculative,
        env_overrides=environment,
        extra=extra,
        written=frozenset(_written(content, sections)),
    )
    return config, problems


class _Loader(yaml.SafeLoader):
    """YAML without silently dropped keys: PyYAML keeps the last of two equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value} is written twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


def _read_yaml(path: Path, problems: list[Problem]) -> dict[Any, Any]:
    """The file's mapping; empty, with one problem, if it cannot be read."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        problems.append(Problem(str(path), line, f"is not YAML: {error.problem}", "Correct that line."))
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(Problem("config file", str(path), f"cannot be read: {error}", "Name a YAML file."))
        return {}
    if content is None or isinstance(content, dict):
        return content or {}
    rule = f"must be a mapping of keys to values, is a {type(content).__name__}"
    problems.append(Problem("config file", str(path), rule, "Write it as `key: value` lines."))
    return {}


def _merged(base: Mapping[Any, Any], over: Mapping[str, object]) -> dict[Any, Any]:
    """`over` laid over `base`, mapping by mapping; a section that is no mapping stays, to be reported."""
    merged = dict(base)
    if "speculative_model" in over:
        merged.pop("speculative_model_dir", None)
    for key, value in over.items():
        below = merged.get(key)
        if not isinstance(value, Mapping):
            merged[key] = value
        elif below is None or isinstance(below, Mapping):
            merged[key] = _merged(below or {}, value)
    return merged


def _section(content: Mapping[Any, Any], name: str, problems: list[Problem]) -> dict[Any, Any]:
    section = content.get(name)
    if section is None:
        return {}
    if isinstance(section, Mapping):
        return dict(section)
    rule, remedy = f"must be a mapping, is a {type(section).__name__}", "Write its keys indented below it."
    problems.append(Problem(name, section, rule, remedy))
    return {}


def _written(content: Mapping[Any, Any], sections: Mapping[str, Mapping[Any, Any]]) -> Iterator[str]:
    """The fields of the engine that have a value in the file."""
    for key, name in ENGINE_FIELDS.items():
        section, _, leaf = key.rpartition(".")
        if (sections[section] if section else content).get(leaf) is not None:
            yield name


def _salvaged(section: Mapping[Any, Any]) -> SpeculativeConfig | None:
    """The head and the kept keys of a section with problems; as a chain, which no rule about sizes judges."""
    head = section.get("speculative_model") or section.get("speculative_model_dir")
    if section.get("decoding_type", "Eagle3") != "Eagle3" or not isinstance(head, str):
        return None
    kept = {key: value for key, value in section.items() if key in known_keys("speculative_config", "Eagle3")}
    kept = {key: value for key, value in kept.items() if key in SPECULATIVE_OPTIONS}
    return SpeculativeConfig(tree_topk=1, speculative_model=head, host_options=kept)


def read_environment(section: Mapping[Any, Any], problems: list[Problem]) -> dict[str, str]:
    """Variables as strings. Numbers are taken as written; true and null have no one spelling as a string."""
    environment = {}
    for name, value in section.items():
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            environment[str(name)] = str(value)
        else:
            rule, remedy = "the value of a variable is a string", "Put it in quotes."
            problems.append(Problem(f"env_overrides.{name}", value, rule, remedy))
    return environment
