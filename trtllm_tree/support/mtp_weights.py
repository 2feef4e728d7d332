"""Are the MTP layer's weights in this checkpoint? Answered from its safetensors headers, before any load.

Owns the checkpoint layout of an MTP layer: one more decoder layer behind the last, with the tensors that join an
embedding to a hidden row and norm the result; and which of a folder's files each host reads. Must not know torch:
`check` asks on a machine without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trtllm_tree.config.host_rules import Host
from trtllm_tree.config.model_rules import MTP_MODELS, UNQUANTISED_REMEDY
from trtllm_tree.errors import Problem
from trtllm_tree.support.model_facts import ModelFacts

_Shapes = dict[str, tuple[int, ...]]
# How every rule about the layer's weights begins; the scope knows them by it.
MTP_LAYER_RULE = "the MTP layer"
_QUANTISED_RULE = f"{MTP_LAYER_RULE} of a quantised checkpoint is not read"
MTP_LAYER_OPTION = "model: MTP layer"
MTP_LAYER_REMEDY = "Use a checkpoint that has its MTP layer, or set decoding_type to Eagle3 and name a head."
_NORMS = ("enorm", "hnorm", "shared_head.norm")
_WHOLE, _INDEX, _MODELOPT = "model.safetensors", "model.safetensors.index.json", "hf_quant_config.json"
# As many names as a message needs: a layer may have thousands.
_SHOWN = 4


@dataclass(frozen=True)
class _Files:
    """A folder's safetensors: those that are read, what an index in use says, and which of its files are missing."""

    read: tuple[Path, ...]
    listed: Mapping[str, str] | None
    lost: tuple[str, ...]


def mtp_weight_problems(target_dir: Path, target: ModelFacts, host: Host = "embedded") -> list[Problem]:
    """Everything that keeps the MTP layer of a checkpoint, whose config counts one, from being loaded by `host`.

    Reads config.json, the index and headers. Models that the host does not draft with, or that name their layer
    otherwise (Nemotron-H), are not searched.
    """
    has_layout = target.model_type in MTP_MODELS["embedded"]
    if not target.num_mtp_layers or not has_layout or target.model_type not in MTP_MODELS[host]:
        return []
    quantised = target.quantization is not None
    if host == "embedded" and quantised and target.value_dim is None:
        return [
            Problem("model: quantization_config", target.quantization, _QUANTISED_RULE, UNQUANTISED_REMEDY)
        ]
    try:
        config = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
        sizes = (config.get("hidden_size"), config.get("num_hidden_layers"))
        if not all(isinstance(size, int) for size in sizes):
            rule = "config.json needs hidden_size and num_hidden_layers"
            return [Problem("model", str(target_dir), rule, "Use a causal language model's folder.")]
        if host == "tensorrt_llm":
            return _tensorrt_llm_problems(target_dir, config, quantised)
        return _embedded_problems(target_dir, config)
    except (OSError, ValueError, SafetensorError) as error:
        rule = f"cannot be searched for the MTP layer ({error})"
        return [Problem("model", str(target_dir), rule, "Download the files again.")]


def _embedded_problems(target_dir: Path, config: Mapping[str, Any]) -> list[Problem]:
    """By the files that transformers reads."""
    files = _transformers_files(target_dir)
    if files.lost:
        return [_lost_problem(target_dir, files.lost)]
    if not files.read:
        rule = f"has no safetensors to read the MTP layer from ({_WHOLE}, or {_INDEX} and its files)"
        return [Problem("model", str(target_dir), rule, "Convert the weights to safetensors.")]
    name, last = _layer_names(config)
    shapes = _read_shapes(files.read, (name, last), files.listed)
    found = _tensors(shapes, name)
    expected = _expected(found, _tensors(shapes, last), config)
    missing = [tensor for tensor in expected if tensor not in found]
    unread = _unread(target_dir, files, name, missing)
    return _missing_problems(name, missing, unread) + _shape_problems(name, found, expected)


def _tensorrt_llm_problems(target_dir: Path, config: Mapping[str, Any], quantised: bool) -> list[Problem]:
    """By the files that TensorRT-LLM reads: all, whatever an index lists.

    It reads other formats too, so a folder without safetensors is its own business.
    """
    paths = sorted(target_dir.glob("*.safetensors"))
    paths = [path for path in paths if "consolidated" not in path.name] or paths
    if not paths:
        return []
    name, last = _layer_names(config)
    shapes = _read_shapes(paths, (name, last))
    found = _tensors(shapes, name)
    if quantised or (target_dir / _MODELOPT).is_file():
        # Quantised weights are packed in shapes, and under names, of their own.
        modules = (*_NORMS, "eh_proj")
        expected: _Shapes = {
            f"{module}.weight": ()
            for module in modules
            if not any(tensor.startswith(f"{module}.") for tensor in found)
        }
    else:
        expected = _expected(found, _tensors(shapes, last), config)
    missing = [tensor for tensor in expected if tensor not in found]
    if missing and (lost := _transformers_files(target_dir).lost):
        return [_lost_problem(target_dir, lost)]
    return _missing_problems(name, missing, {}) + _shape_problems(name, found, expected)


def _lost_problem(target_dir: Path, lost: tuple[str, ...]) -> Problem:
    rule = f"lacks {_listed(list(lost))}, which {_INDEX} lists"
    return Problem("model", str(target_dir), rule, "Download the files again.")


def _missing_problems(name: str, missing: list[str], unread: Mapping[str, str]) -> list[Problem]:
    """Of tensors that are nowhere, and of those that are where nobody reads them: `unread` says where each is."""
    problems = []
    if absent := [tensor for tensor in missing if tensor not in unread]:
        rule = f"{MTP_LAYER_RULE} is not all there: the checkpoint lacks {_listed(absent)}"
        problems.append(Problem(MTP_LAYER_OPTION, name, rule, MTP_LAYER_REMEDY))
    for place in dict.fromkeys(unread.values()):
        names = [tensor for tensor in missing if unread.get(tensor) == place]
        rule = f"{MTP_LAYER_RULE}'s {_listed(names)} lie in {place}"
        remedy = f"Split the weights into files whose tensors {_INDEX} lists, without a {_WHOLE}."
        problems.append(Problem(MTP_LAYER_OPTION, name, rule, remedy))
    return problems


def _shape_problems(name: str, found: _Shapes, expected: _Shapes) -> list[Problem]:
    return [
        Problem(
            f"model: {name}.{tensor}",
            list(found[tensor]),
            f"{MTP_LAYER_RULE} needs shape {list(shape)} here",
            MTP_LAYER_REMEDY,
        )
        for tensor, shape in expected.items()
        if found.get(tensor, shape) != shape
    ]


def _expected(found: _Shapes, last: _Shapes, config: Mapping[str, Any]) -> _Shapes:
    """Tensors of the MTP layer, by those of the target's last layer, and H.

    Its decoder layer is like the last one; but it always has experts, which config.json tells of where the last has
    none. Embedding and head may be stored once more beside it; the target's are used.
    """
    hidden = config["hidden_size"]
    own: _Shapes = {f"{norm}.weight": (hidden,) for norm in _NORMS} | {"eh_proj.weight": (hidden, 2 * hidden)}
    like = {tensor: shape for tensor, shape in last.items() if not tensor.endswith("rotary_emb.inv_freq")}
    if "mlp.gate.weight" in last:
        return own | like
    attention = {tensor: shape for tensor, shape in like.items() if not tensor.startswith("mlp.")}
    is_fused = "mlp.experts.gate_up_proj" in found
    return own | attention | ({} if is_fused else _experts(config, hidden))


def _experts(config: Mapping[str, Any], hidden: int) -> _Shapes:
    """Tensors of the experts, as far as config.json spells out their number and width."""
    keys = ("n_routed_experts", "moe_intermediate_size", "n_shared_experts")
    count, width, shared = (config.get(key) for key in keys)
    if not isinstance(count, int) or not isinstance(width, int):
        return {}
    shapes: _Shapes = {"mlp.gate.weight": (count, hidden), "mlp.gate.e_score_correction_bias": (count,)}
    widths = {f"mlp.experts.{expert}": width for expert in range(count)}
    if isinstance(shared, int) and shared > 0:
        widths["mlp.shared_experts"] = shared * width
    for block, rows in widths.items():
        shapes |= {f"{block}.{part}_proj.weight": (rows, hidden) for part in ("gate", "up")}
        shapes[f"{block}.down_proj.weight"] = (hidden, rows)
    return shapes


def _layer_names(config: Mapping[str, Any]) -> tuple[str, str]:
    """Names of the MTP layer and of the target's last."""
    count = config["num_hidden_layers"]
    return f"model.layers.{count}", f"model.layers.{count - 1}"


def _tensors(shapes: _Shapes, layer: str) -> _Shapes:
    """The tensors of a layer, by their names in it."""
    prefix = f"{layer}."
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _transformers_files(target_dir: Path) -> _Files:
    """`model.safetensors` alone where there is one, else the files and tensors of an index."""
    whole, index = target_dir / _WHOLE, target_dir / _INDEX
    if whole.is_file() or not index.is_file():
        return _Files((whole,) if whole.is_file() else (), None, ())
    content = json.loads(index.read_text(encoding="utf-8"))
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict):
        raise ValueError(f"{_INDEX} has no weight_map")
    names = sorted({str(file) for file in listed.values()})
    read = tuple(target_dir / file for file in names)
    return _Files(read, listed, tuple(path.name for path in read if not path.is_file()))


def _read_shapes(
    paths: Iterable[Path], layers: Iterable[str], listed: Mapping[str, str] | None = None
) -> _Shapes:
    """Shape of every tensor of some layers, of those that are listed if there is a list; from the headers alone."""
    prefixes = tuple(f"{layer}." for layer in layers)
    shapes: _Shapes = {}
    for path in paths:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(prefixes) and (listed is None or name in listed):
                    shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def _unread(target_dir: Path, files: _Files, layer: str, missing: list[str]) -> dict[str, str]:
    """Where those of the missing tensors are that are in a file nevertheless, in words."""
    places: dict[str, str] = {}
    for path in sorted(target_dir.glob("*.safetensors")) if missing else ():
        if files.listed is None:
            place = f"{path.name}, which transformers does not read beside {_WHOLE}"
        elif path in files.read:
            place = f"{path.name}, where {_INDEX} does not list them"
        else:
            place = f"{path.name}, which {_INDEX} does not list, so transformers does not read it"
        try:
            there = _tensors(_read_shapes((path,), (layer,)), layer)
        except SafetensorError:
            # A broken file that nobody reads holds nothing.
            there = {}
        places |= {tensor: place for tensor in missing if tensor in there}
    return places
