"""What the engine runs and how large its buffers are.

Owns the validation of these options and their TensorRT-LLM spelling. Knows nothing about trees, and nothing
about what is installed: "auto" is resolved by the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TypeGuard

from trtllm_tree.config.keys import ENGINE_FIELDS
from trtllm_tree.config.option_names import refuse_unknown
from trtllm_tree.config.tree_rules import is_int
from trtllm_tree.errors import ConfigError, Problem

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
PAGE_SIZES = (16, 32, 64)
KV_CACHE_DTYPES = ("auto", "fp8")
# Legal on TensorRT-LLM without a draft tree; kv_cache_dtype_problems refuses it elsewhere.
TRTLLM_KV_CACHE_DTYPE = "nvfp4"
KV_CACHE_DTYPE_RULE = "K/V are kept as auto (the model's dtype) or fp8 (E4M3, unscaled)"


@refuse_unknown
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """One model on one device.

    Args:
        model: directory of a Hugging Face checkpoint, or "demo"; "" while a file leaves it open.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        device: auto (a GPU where there is one), cpu or cuda.
        max_batch_size: requests that decode together.
        max_num_tokens: rows of one prefill forward; a longer prompt is prefilled in chunks.
        max_seq_len: tokens of a request, prompt included; None takes the model's limit.
        tokens_per_block: KV rows of a page: 16, 32 or 64.
        kv_cache_dtype: auto (the model's dtype) or fp8 (E4M3, unscaled, saturating), for target and draft.
        kv_cache_tokens: KV rows in the pool; None has room for max_batch_size requests of 2048 tokens, and for
            one of full length.
        cuda_graphs: replay decode steps as CUDA graphs on a GPU.

    Raises:
        ConfigError: with every rule that is broken.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_batch_size: int = 8
    max_num_tokens: int = 1024
    max_seq_len: int | None = None
    tokens_per_block: int = 32
    kv_cache_dtype: str = "auto"
    kv_cache_tokens: int | None = None
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        problems = _engine_problems(values, {})
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_trtllm(cls, mapping: Mapping[str, object], *, device: str = "auto") -> EngineConfig:
        """Read the top level of a TensorRT-LLM file: the keys in `ENGINE_FIELDS`; others are not looked at.

        A null value means that the key is not set, as in TensorRT-LLM.

        Raises:
            ConfigError: with every wrong value, spelled as in the file.
        """
        values: dict[str, object] = {"model": "", "device": device}
        for key, name in ENGINE_FIELDS.items():
            section, _, leaf = key.rpartition(".")
            source = mapping.get(section) if section else mapping
            value = source.get(leaf) if isinstance(source, Mapping) else None
            if value is not None:
                values[name] = value
        problems = _engine_problems(values, {name: key for key, name in ENGINE_FIELDS.items()})
        if problems:
            raise ConfigError(problems)
        return cls(**values)  # pyright: ignore[reportArgumentType]


def _engine_problems(values: Mapping[str, object], spelled: Mapping[str, str]) -> list[Problem]:
    """Every rule that the given fields break; `spelled` says what the user calls a field."""
    defaults = {item.name: item.default for item in fields(EngineConfig)}
    problems: list[Problem] = []

    def report(name: str, rule: str, remedy: str) -> None:
        problems.append(Problem(spelled.get(name, name), values[name], rule, remedy))

    for name, value in values.items():
        label = spelled.get(name, name)
        if name == "model" and not isinstance(value, str):
            report(name, "must be a directory or a name", 'Name the directory of a checkpoint, or "demo".')
        elif name in ("dtype", "device"):
            known = DTYPES if name == "dtype" else DEVICES
            if value not in known:
                near = get_close_matches(str(value), known, n=1) or ["auto"]
                report(name, f"must be one of {', '.join(known)}", f"Set {label} to {near[0]}.")
        elif name == "kv_cache_dtype" and value not in (*KV_CACHE_DTYPES, TRTLLM_KV_CACHE_DTYPE):
            near = get_close_matches(str(value), KV_CACHE_DTYPES, n=1) or ["auto"]
            rule = (
                f"{KV_CACHE_DTYPE_RULE}; TensorRT-LLM without a draft tree also takes {TRTLLM_KV_CACHE_DTYPE}"
            )
            report(name, rule, f"Set {label} to {near[0]}.")
        elif name == "cuda_graphs" and not isinstance(value, bool):
            report(name, "must be true or false", f"Set {label} to {defaults[name]}.")
        elif name == "tokens_per_block" and (not is_int(value) or value not in PAGE_SIZES):
            report(name, "a page holds 16, 32 or 64 rows", f"Set {label} to {defaults[name]}.")
        elif name in ("max_batch_size", "max_num_tokens") and not _is_positive(value):
            report(name, "must be a positive integer", f"Set {label} to {defaults[name]}.")
        elif name in ("max_seq_len", "kv_cache_tokens") and value is not None and not _is_positive(value):
            report(name, "must be a positive integer", "Leave it out to have it chosen.")
    tokens, page = values.get("kv_cache_tokens"), values.get("tokens_per_block", defaults["tokens_per_block"])
    if _is_positive(tokens) and is_int(page) and page in PAGE_SIZES and tokens < page:
        label = spelled.get("kv_cache_tokens", "kv_cache_tokens")
        report(
            "kv_cache_tokens", f"the pool holds at least one page of {page} rows", f"Set {label} to {page}."
        )
    return problems


def kv_cache_dtype_problems(value: str, option: str) -> list[Problem]:
    """Why the embedded host, and any host with a draft tree, cannot keep K/V in this dtype; `option` is its name."""
    if value in KV_CACHE_DTYPES:
        return []
    return [Problem(option, value, KV_CACHE_DTYPE_RULE, f"Set {option} to fp8 or auto.")]


def _is_positive(value: object) -> TypeGuard[int]:
    return is_int(value) and value > 0
