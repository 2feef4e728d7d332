"""Does this EAGLE3 checkpoint fit this target? Answered from config.json and tensor headers, before any load.

Owns the checkpoint layout of SafeAILab's EAGLE3 heads and the two conventions for feature layer ids. Must not
know torch: a wrong head has to be reported by `check` on a machine without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from trtllm_tree.errors import Problem

WEIGHTS_FILE = "model.safetensors"
_OPTION = "speculative_model"
_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
_RETRAIN = "Use a head that was trained for this target."
SEES_EVERY_KEY_RULE = "an EAGLE3 head's layer sees every key"
GROUPED_HEADS_RULE = "an EAGLE3 head has grouped heads"
_INTEGER_DTYPES = ("I64", "I32", "I16", "U64", "U32", "U16")
# Keys whose other value means a different forward pass; silently ignoring one would ruin acceptance.
_FIXED_KEYS = {
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
}
_LENGTH_ROPE_TYPES = ("dynamic", "longrope")
_REQUIRED_SIZES = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")


@dataclass(frozen=True)
class TargetSize:
    """The sizes of the target that a head depends on."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def head_problems(head_dir: Path, target_dir: Path) -> list[Problem]:
    """Everything that keeps the EAGLE3 head in `head_dir` from drafting for the model in `target_dir`.

    Reads both config.json files, the header of the head's weights, and its `d2t` and `t2d`. An empty list
    means that `draft.eagle3_head.load_eagle3_head` will load it.
    """
    problems: list[Problem] = []
    config = _read_config(target_dir, "model", problems)
    if config is None:
        return problems + head_problems_for(head_dir, None)
    text = config.get("text_config", config)
    sizes = [text.get(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers")]
    if not all(_is_size(size) for size in sizes):
        rule = "config.json needs hidden_size, vocab_size and num_hidden_layers"
        problems.append(Problem("model", str(target_dir), rule, "Use a causal language model's folder."))
        return problems + head_problems_for(head_dir, None)
    return head_problems_for(head_dir, TargetSize(*sizes))


def head_problems_for(head_dir: Path, target: TargetSize | None) -> list[Problem]:
    """`head_problems` for a target whose sizes are known; with None, only what the head itself shows."""
    problems: list[Problem] = []
    if not head_dir.is_dir():
        return [Problem(_OPTION, str(head_dir), "no such folder", "Give the folder of an EAGLE3 head.")]
    config = _read_config(head_dir, _OPTION, problems)
    shapes = _read_shapes(head_dir, problems)
    if config is not None:
        sizes_known = _check_config(config, target, problems)
        if sizes_known and shapes is not None:
            _check_shapes(config, shapes, target, problems)
            _check_draft_vocabulary(head_dir / WEIGHTS_FILE, config, shapes, problems)
    return problems


def aux_layer_ids(head_config: Mapping[str, Any], num_target_layers: int) -> tuple[int, int, int]:
    """The three target layers whose *input* residual stream feeds the head, lowest first.

    The top-level key `eagle_aux_hidden_state_layer_ids` already counts this way. The one inside
    `eagle_config` names the layers whose output is meant, one less. Without either, they are EAGLE3's
    usual 2, L // 2 and L - 3. The values are not checked here; `head_problems` does that.
    """
    low, mid, high = _declared_layer_ids(head_config, num_target_layers)
    return low, mid, high


def draft_vocab_size(head_config: Mapping[str, Any]) -> int:
    """Rows of the head's lm_head: `draft_vocab_size`, or the whole vocabulary when the key is absent."""
    return head_config.get("draft_vocab_size") or head_config["vocab_size"]


def _declared_layer_ids(config: Mapping[str, Any], num_target_layers: int) -> list[int]:
    if config.get(_IDS_KEY) is not None:
        return list(config[_IDS_KEY])
    finished = _eagle_config(config).get(_IDS_KEY)
    if finished is not None:
        return [layer + 1 for layer in finished]
    return [2, num_target_layers // 2, num_target_layers - 3]


def _read_config(model_dir: Path, option: str, problems: list[Problem]) -> dict[str, Any] | None:
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(
            Problem(option, str(model_dir), "has no config.json", "Give a complete model folder.")
        )
        return None
    except (OSError, ValueError) as error:
        problems.append(Problem(option, str(path), f"cannot be read ({error})", "Download the file again."))
        return None
    if not isinstance(config, dict):
        problems.append(Problem(option, str(path), "must be a JSON object", "Download the file again."))
        return None
    return config


def _read_shapes(head_dir: Path, problems: list[Problem]) -> dict[str, tuple[int, ...]] | None:
    """Shape of every tensor in the head's weights, from the header alone."""
    path = head_dir / WEIGHTS_FILE
    if not path.is_file():
        if (head_dir / "pytorch_model.bin").is_file():
            rule = f"has only pytorch_model.bin, a pickle; weights are read from {WEIGHTS_FILE}"
            remedy = "Convert it once: safetensors.torch.save_file(torch.load(..., weights_only=True), ...)."
        else:
            rule = f"has no {WEIGHTS_FILE}"
            remedy = f"Give a complete head folder, its weights in one {WEIGHTS_FILE}."
        problems.append(Problem(_OPTION, str(head_dir), rule, remedy))
        return None
    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        problems.append(Problem(_OPTION, str(path), f"cannot be read ({error})", "Download the file again."))
        return None


def _check_config(config: dict[str, Any], target: TargetSize | None, problems: list[Problem]) -> bool:
    """Report wrong config values; True when the sizes that the tensor shapes follow from are usable."""
    before = len(problems)
    for key in _REQUIRED_SIZES:
        _require(_is_size(config.get(key)), key, config.get(key), "must be a positive integer", problems)
    sizes_known = len(problems) == before
    if sizes_known:
        heads, kv_heads, head_dim = _head_sizes(config)
        rule = f"num_attention_heads = {heads} must be a multiple of it"
        is_divisor = _is_size(kv_heads) and heads % kv_heads == 0
        _require(is_divisor, "num_key_value_heads", kv_heads, rule, problems)
        rule = "must be a positive even integer, for rotary pairs"
        is_even = _is_size(head_dim) and head_dim % 2 == 0
        _require(is_even, "head_dim", head_dim, rule, problems)
        draft_vocab = draft_vocab_size(config)
        rule = f"must be 1 to vocab_size = {config['vocab_size']}"
        is_subset = _is_size(draft_vocab) and draft_vocab <= config["vocab_size"]
        _require(is_subset, "draft_vocab_size", draft_vocab, rule, problems)
        sizes_known = len(problems) == before
    layers = config.get("num_hidden_layers", 1)
    _require(layers == 1, "num_hidden_layers", layers, "an EAGLE3 head has one layer", problems)
    for key, wanted in _FIXED_KEYS.items():
        value = config.get(key) or False
        _require(value == wanted, key, value, f"only {wanted} is implemented", problems)
    uses_features = _eagle_config(config).get("use_aux_hidden_state", True)
    rule = "EAGLE3 drafts from three target features"
    _require(uses_features is True, "eagle_config.use_aux_hidden_state", uses_features, rule, problems)
    _check_sees_every_key(config, problems)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type"))
    rule = "its frequencies change with the longest row, but rows of different requests share a step"
    _require(rope_type not in _LENGTH_ROPE_TYPES, "rope_scaling", rope_type, rule, problems)
    if target is not None:
        for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            value = config.get(key)
            if _is_size(value):
                _require(value == wanted, key, value, f"the target has {wanted}", problems)
        _check_layer_ids(config, target.num_layers, problems)
    return sizes_known


def _check_sees_every_key(config: dict[str, Any], problems: list[Problem]) -> None:
    """The draft layer is full attention without sinks: lanes are masked by ancestry alone."""
    window = config.get("sliding_window") if config.get("use_sliding_window") is not False else None
    _require(not window, "sliding_window", window, SEES_EVERY_KEY_RULE, problems)
    kinds = config.get("layer_types") or []
    is_full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    _require(is_full, "layer_types", kinds, "an EAGLE3 head's layer is full_attention", problems)


def _check_layer_ids(config: dict[str, Any], num_layers: int, problems: list[Problem]) -> None:
    top, inner = config.get(_IDS_KEY), _eagle_config(config).get(_IDS_KEY)
    for key, ids in ((_IDS_KEY, top), (f"eagle_config.{_IDS_KEY}", inner)):
        is_list = ids is None or (
            isinstance(ids, list) and all(type(i) is int for i in ids) and len(ids) == 3
        )
        _require(is_list, key, ids, "must be a list of three integers", problems)
        if not is_list:
            return
    entered = _declared_layer_ids(config, num_layers)
    in_range = 0 <= entered[0] < entered[1] < entered[2] < num_layers
    rule = f"must name three different layers of the target's {num_layers}, lowest first"
    _require(in_range, _IDS_KEY, entered, rule, problems)
    if top is not None and inner is not None:
        rule = f"must be one more than eagle_config's {inner}, which counts finished layers"
        agrees = top == [layer + 1 for layer in inner]
        _require(agrees, _IDS_KEY, top, rule, problems, "Remove the key that does not match the training.")


def _check_shapes(
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    target: TargetSize | None,
    problems: list[Problem],
) -> None:
    expected = _expected_shapes(config, target)
    for name, wanted in expected.items():
        found = shapes.get(name)
        if found is None:
            _require(False, name, None, f"this tensor of shape {list(wanted)} is missing", problems)
        else:
            _require(found == wanted, name, list(found), f"its shape must be {list(wanted)}", problems)
    optional = {"embed_tokens.weight": (config["vocab_size"], config["hidden_size"])}
    for name, found in shapes.items():
        if name in optional:
            wanted = optional[name]
            _require(found == wanted, name, list(found), f"its shape must be {list(wanted)}", problems)
        elif name not in expected and name not in ("d2t", "t2d"):
            _require(False, name, list(found), "this tensor is not part of an EAGLE3 head", problems)


def _expected_shapes(config: dict[str, Any], target: TargetSize | None) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, head_dim = _head_sizes(config)
    layer = "midlayer"
    return {
        "fc.weight": (hidden, 3 * (target.hidden_size if target else hidden)),
        f"{layer}.hidden_norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * head_dim),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab_size(config), hidden),
    }


def _check_draft_vocabulary(
    path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], problems: list[Problem]
) -> None:
    """`d2t` maps draft id i to target id i + d2t[i], one to one; `t2d` marks exactly those target ids."""
    draft_vocab, vocab = draft_vocab_size(config), config["vocab_size"]
    if "d2t" not in shapes:
        rule = f"is missing, and draft_vocab_size = {draft_vocab} is below vocab_size = {vocab}"
        _require(draft_vocab == vocab, "d2t", None, rule, problems)
        return
    with safe_open(path, framework="np") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in ("d2t", "t2d") if name in shapes}
        if shapes["d2t"] != (draft_vocab,) or dtypes["d2t"] not in _INTEGER_DTYPES:
            found = f"{dtypes['d2t']} {list(shapes['d2t'])}"
            _require(False, "d2t", found, f"must be integers of shape [{draft_vocab}]", problems)
            return
        targets = np.arange(draft_vocab) + file.get_tensor("d2t").astype(np.int64)
        outside = int(((targets < 0) | (targets >= vocab)).sum())
        rule = f"i + d2t[i] must lie in [0, {vocab}) (d2t holds offsets, not ids)"
        _require(outside == 0, "d2t", f"{outside} entries outside", rule, problems)
        repeated = draft_vocab - len(np.unique(targets))
        rule = "two draft ids must not share a target id i + d2t[i]"
        _require(repeated == 0, "d2t", f"{repeated} repeated", rule, problems)
        if "t2d" not in shapes or outside:
            return
        if shapes["t2d"] != (vocab,) or dtypes["t2d"] != "BOOL":
            found = f"{dtypes['t2d']} {list(shapes['t2d'])}"
            _require(False, "t2d", found, f"must be booleans of shape [{vocab}]", problems)
            return
        marked = np.zeros(vocab, dtype=bool)
        marked[targets] = True
        wrong = int((marked != file.get_tensor("t2d")).sum())
        rule = "must be true exactly at the target ids i + d2t[i]"
        _require(wrong == 0, "t2d", f"{wrong} entries differ", rule, problems)


def _head_sizes(config: dict[str, Any]) -> tuple[int, int, int]:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return heads, kv_heads, config.get("head_dim") or config["hidden_size"] // heads


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _require(
    holds: bool, part: str, value: object, rule: str, problems: list[Problem], remedy: str = _RETRAIN
) -> None:
    if not holds:
        problems.append(Problem(f"{_OPTION}: {part}", value, rule, remedy))


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("eagle_config")
    return inner if isinstance(inner, dict) else {}
