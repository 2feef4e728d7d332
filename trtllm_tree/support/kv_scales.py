"""Can this checkpoint's K/V be kept in an unscaled FP8 cache? Answered from its files, before any load.

Owns how checkpoints carry KV scales: as tensors beside the projections, and as a declared format in config.json
or ModelOpt's hf_quant_config.json. Must not know torch: `check` asks on a machine without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_tree.errors import Problem

# k_scale and v_scale of ModelOpt and of newer compressed-tensors, kv_scale of AMD's tools, output_scale of the
# projections in older compressed-tensors and Quark, and TensorRT-LLM's own name.
_SCALE_NAME = re.compile(r"(^|[._])((k|v|kv)_scale|[kv]_proj\.output_scale|kv_cache_scaling_factor)$")
_NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
UNSCALED_RULE = "K/V are kept in FP8 (E4M3) unscaled"
_REMEDY = "Set kv_cache_dtype to auto, or use a checkpoint without KV scales."


def kv_scale_problems(model_dir: Path, option: str = "model") -> list[Problem]:
    """Everything in a checkpoint that an unscaled FP8 E4M3 cache would not honour.

    Scales that are all 1 are fine, and so is a declared FP8 cache. Reads JSON, safetensors headers and the scales.

    Args:
        model_dir: local Hugging Face directory; files that are missing are the business of other checks.
        option: what the user calls the directory.
    """
    rule = f"{UNSCALED_RULE}, and this checkpoint wants its cache otherwise"
    problems = [Problem(f"{option}: {key}", value, rule, _REMEDY) for key, value in _declared(model_dir)]
    files = sorted(model_dir.glob("*.safetensors"))
    if not files and any(model_dir.glob("pytorch_model*.bin")):
        rule = f"{UNSCALED_RULE}, and a pickle cannot be searched for scales"
        remedy = "Convert the weights to safetensors, or set kv_cache_dtype to auto."
        problems.append(Problem(option, str(model_dir), rule, remedy))
    for path in files:
        try:
            found = [(name, value) for name, value in _scales(path) if value != 1.0]
        except (OSError, ValueError) as error:
            rule = f"cannot be searched for KV scales ({error})"
            problems.append(Problem(option, str(path), rule, "Download the file again."))
            continue
        problems += [
            Problem(f"{option}: {name}", value, f"{UNSCALED_RULE}, so a scale must be 1", _REMEDY)
            for name, value in found
        ]
    return problems


def _declared(model_dir: Path) -> Iterator[tuple[str, object]]:
    """Key and value of every declared cache format that is not static FP8."""
    config = _read_json(model_dir / "config.json")
    for key in ("quantization_config", "compression_config"):
        section = _mapping(config.get(key))
        if not _is_fp8(section.get("kv_cache_quant_algo")):
            yield f"{key}.kv_cache_quant_algo", section["kv_cache_quant_algo"]
        scheme = section.get("kv_cache_scheme")
        if scheme is not None and not _is_static_fp8(_mapping(scheme)):
            yield f"{key}.kv_cache_scheme", scheme
    section = _mapping(_read_json(model_dir / "hf_quant_config.json").get("quantization"))
    if not _is_fp8(section.get("kv_cache_quant_algo")):
        yield "hf_quant_config.json: quantization.kv_cache_quant_algo", section["kv_cache_quant_algo"]


def _is_fp8(algo: object) -> bool:
    """Whether ModelOpt's name is that of FP8, or of no quantisation."""
    return str(algo).upper() in ("FP8", "NONE")


def _is_static_fp8(scheme: Mapping[str, Any]) -> bool:
    """Eight-bit floats are E4M3 in compressed-tensors. A dynamic scheme takes scales from the running K/V."""
    return scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _scales(path: Path) -> Iterator[tuple[str, object]]:
    """Name and value of every KV scale in a safetensors file; of several values the one furthest from 1.

    Source: the safetensors format: eight bytes of header length, the JSON header, the tensors' bytes.
    """
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > path.stat().st_size:
            raise ValueError("its header is cut off")
        for name, entry in json.loads(file.read(start - 8)).items():
            if not _SCALE_NAME.search(name):
                continue
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            values = _floats(file.read(end - begin), entry["dtype"])
            if values is None:
                yield name, f"a {entry['dtype']} tensor, which is not read here"
            elif values.size:
                yield name, float(values.flat[np.abs(values - 1.0).argmax()])


def _floats(data: bytes, dtype: str) -> np.ndarray | None:
    """The values as float64; bfloat16, which numpy has not, is the upper half of a float32."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(data, _NUMPY_DTYPES[dtype]).astype(np.float64) if dtype in _NUMPY_DTYPES else None
