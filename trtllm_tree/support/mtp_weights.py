"""Are the MTP layer's weights in this checkpoint? Answered from its safetensors headers, before any load.

Owns the checkpoint layout of an MTP layer: one more decoder layer behind the last, with the tensors that join an
embedding to a hidden row and norm the result. Must not know torch: `check` asks on a machine without it.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from trtllm_tree.config.model_rules import MTP_MODELS, UNQUANTISED_REMEDY
from trtllm_tree.errors import Problem
from trtllm_tree.support.model_facts import ModelFacts

_Shapes = dict[str, tuple[int, ...]]
_QUANTISED_RULE = "the MTP layer of a quantised checkpoint is not read"
_REMEDY = "Use a checkpoint that has its MTP layer, or set decoding_type to Eagle3 and name a head."
_NORMS = ("enorm", "hnorm", "shared_head.norm")
# As many names as a message needs: a layer may have thousands.
_SHOWN = 4


def mtp_weight_problems(target_dir: Path, target: ModelFacts) -> list[Problem]:
    """Everything that keeps the MTP layer of a checkpoint, whose config counts one, from being loaded.

    Reads config.json and the headers. Models that the embedded host does not draft with are not searched.
    """
    if not target.num_mtp_layers or target.model_type not in MTP_MODELS["embedded"]:
        return []
    if target.quantization is not None and target.value_dim is None:
        return [
            Problem("model: quantization_config", target.quantization, _QUANTISED_RULE, UNQUANTISED_REMEDY)
        ]
    try:
        shapes = _read_shapes(target_dir)
        config = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        rule = f"cannot be searched for the MTP layer ({error})"
        return [Problem("model", str(target_dir), rule, "Download the files again.")]
    if not shapes:
        rule = "has no safetensors, from which the MTP layer is read"
        return [Problem("model", str(target_dir), rule, "Convert the weights to safetensors.")]
    num_layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    if not isinstance(num_layers, int) or not isinstance(hidden, int):
        rule = "config.json needs hidden_size and num_hidden_layers"
        return [Problem("model", str(target_dir), rule, "Use a causal language model's folder.")]
    name, last = (f"model.layers.{index}" for index in (num_layers, num_layers - 1))
    return _layer_problems(name, _tensors(shapes, name), _expected(_tensors(shapes, last), hidden))


def _layer_problems(name: str, found: _Shapes, expected: _Shapes) -> list[Problem]:
    problems = []
    if missing := [tensor for tensor in expected if tensor not in found]:
        rule = f"config.json counts an MTP layer, and the checkpoint lacks {_listed(missing)}"
        problems.append(Problem("model: MTP layer", name, rule, _REMEDY))
    for tensor, shape in expected.items():
        if found.get(tensor, shape) != shape:
            rule = f"its shape must be {list(shape)}"
            problems.append(Problem(f"model: {name}.{tensor}", list(found[tensor]), rule, _REMEDY))
    return problems


def _expected(last: _Shapes, hidden: int) -> _Shapes:
    """Tensors of the MTP layer, by those of the target's last layer and H.

    Its decoder layer is like the last one, as far as that has experts: an MTP layer always has them. Embedding and
    head may be stored once more beside it; the target's are used.
    """
    own: _Shapes = {f"{norm}.weight": (hidden,) for norm in _NORMS} | {"eh_proj.weight": (hidden, 2 * hidden)}
    has_experts = "mlp.gate.weight" in last
    computed = ("rotary_emb.inv_freq",)
    return own | {
        tensor: shape
        for tensor, shape in last.items()
        if (has_experts or not tensor.startswith("mlp.")) and not tensor.endswith(computed)
    }


def _tensors(shapes: _Shapes, layer: str) -> _Shapes:
    """The tensors of a layer, by their names in it."""
    prefix = f"{layer}."
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _read_shapes(target_dir: Path) -> _Shapes:
    """Shape of every tensor of the checkpoint, from the headers alone."""
    shapes: _Shapes = {}
    for path in sorted(target_dir.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes
