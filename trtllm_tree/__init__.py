"""Draft-tree speculative decoding for TensorRT-LLM, and on one machine without it.

The public names, each imported when it is first used: importing this package loads neither torch nor a host.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtllm_tree.config import (
        EngineConfig,
        GuidedDecodingParams,
        SamplingParams,
        SpeculativeConfig,
        load_config,
    )
    from trtllm_tree.errors import (
        ConfigError,
        HostError,
        HostUnavailableError,
        RequestError,
        TreeError,
        UnsupportedError,
    )
    from trtllm_tree.llm import LLM
    from trtllm_tree.outputs import AcceptanceStats, CompletionOutput, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AcceptanceStats",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "GuidedDecodingParams",
    "HostError",
    "HostUnavailableError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "TreeError",
    "UnsupportedError",
    "__version__",
    "load_config",
]

_MODULES = {
    "config": ("EngineConfig", "GuidedDecodingParams", "SamplingParams", "load_config"),
    "errors": (
        "ConfigError",
        "HostError",
        "HostUnavailableError",
        "RequestError",
        "TreeError",
        "UnsupportedError",
    ),
    # In a process with TensorRT-LLM its objects come out of it; type checkers see ours.
    "hosts.tensorrt_llm.speculation": ("SpeculativeConfig",),
    "llm": ("LLM",),
    "outputs": ("AcceptanceStats", "CompletionOutput", "RequestOutput"),
}
_HOMES = {name: f"trtllm_tree.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
