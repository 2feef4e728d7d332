"""Puts the runtime double together: TensorRT-LLM's module paths in one layout, over copies of `runtime/`.

What `runtime` does not implement stays signatures only. The package is on disk, so that other processes see it too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.doubles.tensorrt_llm import Entry, double_entries, double_version, package_texts, write_texts

RUNTIME = Path(__file__).parent / "runtime"
_INNER = "tensorrt_llm._double"

# Names of the signatures file that runtime modules implement.
IMPLEMENTED = {
    "attention": ["TrtllmAttention"],
    "distributed": ["allgather"],
    "drafter": ["Drafter"],
    "fmha": ["Fmha", "FmhaParams", "PhasedFmha"],
    "glm": ["Glm4MTP", "Glm4MoeForCausalLM"],
    "kv_cache": ["KVCacheManager", "KVCacheManagerV2"],
    "llm": ["LLM"],
    "llm_args": ["Eagle3DecodingConfig", "MTPDecodingConfig", "TorchLlmArgs", "UserProvidedDecodingConfig"],
    "forward_args": ["AttentionForwardArgs"],
    "mamba": ["MambaCacheManager"],
    "metadata": ["AttentionMetadata", "TrtllmAttentionMetadata"],
    "model_parts": ["register_auto_model"],
    "models": [
        "DeepseekV3ForCausalLM", "GptOssForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
        "SpecDecOneEngineForCausalLM",
    ],
    "mtp": ["DeepseekV3MTPHead", "MTPForCausalLM"],
    "mtp_worker": ["MTPEagleWorker"],
    "nemotron": ["NemotronHForCausalLM", "NemotronHMTP"],
    "registry": ["DEFAULT_FMHA_LIBS", "FMHA_LIBS", "get_enabled_fmha_lib_classes"],
    "resources": ["ResourceManager", "ResourceManagerType"],
    "sampling_params": ["SamplingParams"],
    "serve": ["main"],
    "spec_metadata": ["Eagle3OneModelSpecMetadata", "SpecMetadata"],
    "spec_tree": ["DynamicTreeSlotStorage", "MTPEagleDynamicTreeResourceManager", "SpecTreeManager"],
    "spec_worker": ["Eagle3OneModelWorker", "SpecWorkerBase"],
}  # fmt: skip
# What the runtime has besides: names that code of TensorRT-LLM's users imports, and that no symbol of ours needs.
_TORCH = "tensorrt_llm._torch"
FURTHER = [
    (
        "tensorrt_llm.llmapi.llm_args",
        "llm_args",
        ["EagleDecodingConfig", "KvCacheConfig", "SpeculativeConfig"],
    ),
    ("{attention}.interface", "forward_args", ["AttentionInputType"]),
    ("{attention}.interface", "metadata", ["KVCacheParams"]),
    ("{attention}.fmha.fallback", "fallback", ["FallbackFmha"]),
    ("{attention}.fmha.phased", "fmha", ["FmhaParams", "PhasedFmha"]),
    ("{attention}.fmha.manager", "manager", ["CombinedFmha", "FmhaManager"]),
    ("{attention}.trtllm", "attention", ["TrtllmAttention", "MLAParams"]),
    ("{kv_cache}.mamba_cache_manager", "mamba", ["MambaHybridCacheManager", "MambaHybridCacheManagerV2"]),
    (f"{_TORCH}.model_config", "model_parts", ["ModelConfig"]),
    (f"{_TORCH}.models.modeling_utils", "model_parts", ["MODEL_CLASS_MAPPING", "DecoderModelForCausalLM"]),
    (f"{_TORCH}.models.modeling_mistral", "models", ["MistralForCausalLM"]),
    (f"{_TORCH}.models.modeling_speculative", "eagle3_model", ["Eagle3DraftModel", "Eagle3ForCausalLM"]),
    (f"{_TORCH}.speculative.mtp_dynamic_tree", "mtp_worker", ["MTPEagleDynamicTreeWorker"]),
    (f"{_TORCH}.speculative.mode", "mode", ["SpeculativeDecodingMode"]),
    (f"{_TORCH}.speculative.eagle3_dynamic_tree", "spec_worker", ["Eagle3OneModelDynamicTreeWorker"]),
    (
        f"{_TORCH}.pyexecutor.llm_request",
        "requests",
        ["LlmRequest", "LlmRequestState", "get_draft_token_length"],
    ),
    (f"{_TORCH}.pyexecutor.scheduler", "requests", ["ScheduledRequests"]),
    ("tensorrt_llm.bindings", "bindings", ["DataType"]),
    ("tensorrt_llm.mapping", "model_parts", ["Mapping"]),
    ("tensorrt_llm.tools.importlib_utils", "serve", ["import_custom_module_from_dir"]),
]
_MODULE_OF = {name: module for module, names in IMPLEMENTED.items() for name in names}


def runtime_entries(layout: str) -> list[Entry]:
    """The layout's symbols, those that the runtime has as imports of it."""
    entries = double_entries(layout)
    packages = double_packages(layout)
    taken = set()
    for entry in entries:
        if entry["name"] in _MODULE_OF:
            taken.add((entry["module"], entry["name"]))
            owned = entry["kind"] in ("class", "fields")
            entry.update(
                kind="runtime", source=_import(_MODULE_OF[entry["name"]], entry["name"], owned=owned)
            )
    for module, implementation, names in FURTHER:
        path = module.format(**packages)
        for name in names:
            if (path, name) not in taken:
                entries.append(
                    {"module": path, "name": name, "kind": "runtime", "source": _import(implementation, name)}
                )
    return entries


def double_packages(layout: str) -> dict[str, str]:
    """Where the packages that moved are in a layout."""
    new = layout == "new"
    return {
        "attention": f"{_TORCH}.attention.backends" if new else f"{_TORCH}.attention_backend",
        "kv_cache": f"{_TORCH}.pyexecutor.kv_cache" if new else f"{_TORCH}.pyexecutor",
    }


def write_runtime(root: Path, layout: str) -> None:
    """Make `root` hold the runtime double in a layout ("new" or "old"), and nothing else."""
    assert layout in ("new", "old"), layout
    texts = package_texts(root, runtime_entries(layout), double_version(layout))
    for path in sorted(RUNTIME.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.name == "layout.py":
            text = text.replace("NEW = True", f"NEW = {layout == 'new'}")
        texts[root / "tensorrt_llm" / "_double" / path.name] = text
    write_texts(root, texts)


@contextmanager
def runtime_double(root: Path, layout: str) -> Iterator[None]:
    """While it lasts, `import tensorrt_llm` finds the runtime double of this layout."""
    write_runtime(root, layout)
    forget()
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        forget()


def forget() -> None:
    """Drop what was imported of any double."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def _import(module: str, name: str, *, owned: bool = False) -> str:
    line = f"from {_INNER}.{module} import {name}"
    # Pickles and logs name the place that users know.
    return f"{line}\n{name}.__module__ = __name__" if owned else line
