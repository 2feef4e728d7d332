"""Small random targets with an MTP layer in their checkpoint, laid out as released ones are.

The layer is written as one more decoder layer behind the last, with the tensors that an MTP layer has besides. Seeds
are fixed. Embedding and head are stored once more beside the layer, as in released checkpoints, but as NaN: nothing may
use them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.builders import tiny_deepseek_dir, write_byte_tokenizer

MTP_KINDS = ("glm4_moe", "deepseek_v3")
NUM_LAYERS = 3
# Of an embedding, and so of the stream that enters the first layer.
_EMBEDDING_SIZE = 0.2


def tiny_mtp_dir(
    root: Path,
    kind: str,
    *,
    name: str | None = None,
    agrees: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Write a random target of model type `kind` with an MTP layer to `root / name`, and return that folder.

    Of a random layer's drafts none is right. With `agrees` many are: the target's layers add little to a token's
    embedding, so the next token depends mostly on the last one, and the MTP layer passes embeddings on in the same way.
    """
    options = {"num_hidden_layers": NUM_LAYERS} | overrides
    num_layers = options["num_hidden_layers"]
    assert isinstance(num_layers, int)
    deeper = options | {"num_hidden_layers": num_layers + 1}
    build = {"glm4_moe": _tiny_glm_dir, "deepseek_v3": tiny_deepseek_dir}[kind]
    target_dir = build(root, name=name or kind, dtype=dtype, seed=seed, **deeper)  # type: ignore[arg-type]
    weights = load_file(target_dir / "model.safetensors")
    weights |= _mtp_tensors(weights, f"model.layers.{num_layers}", agrees=agrees, seed=seed)
    for key, tensor in weights.items():
        if key.endswith("e_score_correction_bias"):
            generator = torch.Generator().manual_seed(seed + 2)
            weights[key] = 0.2 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    # What layers add is small beside an embedding, or the other way round.
    small = ("o_proj.weight", "down_proj.weight") if agrees else ("model.embed_tokens.weight",)
    for key, tensor in weights.items():
        if key.endswith(small):
            weights[key] = tensor * (0.01 if agrees else 0.1)
    save_file(weights, target_dir / "model.safetensors", metadata={"format": "pt"})
    set_config(target_dir, num_hidden_layers=num_layers)
    return target_dir


def set_config(target_dir: Path, **options: object) -> None:
    """Overwrite keys of a folder's config.json; None removes one."""
    path = target_dir / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | options
    kept = {key: value for key, value in config.items() if key not in options or value is not None}
    path.write_text(json.dumps(kept, indent=2), encoding="utf-8")


def drop_tensors(target_dir: Path, *endings: str) -> None:
    """Take the tensors with these endings of their names out of a folder's weights."""
    path = target_dir / "model.safetensors"
    kept = {key: tensor for key, tensor in load_file(path).items() if not key.endswith(endings)}
    save_file(kept, path, metadata={"format": "pt"})


def _mtp_tensors(
    weights: dict[str, torch.Tensor], layer: str, *, agrees: bool, seed: int
) -> dict[str, torch.Tensor]:
    """What an MTP layer has besides a decoder layer."""
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    hidden, dtype = embedding.shape[1], embedding.dtype
    generator = torch.Generator().manual_seed(seed + 1)
    own = {
        f"{norm}.weight": 1.0 + 0.2 * torch.randn(hidden, generator=generator)
        for norm in ("enorm", "hnorm", "shared_head.norm")
    }
    own["eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    if agrees:
        own["enorm.weight"] = torch.ones(hidden)
        own["shared_head.norm.weight"] = weights["model.norm.weight"].float().clone()
        own["eh_proj.weight"] = torch.cat(
            (_EMBEDDING_SIZE * torch.eye(hidden), 0.05 * own["eh_proj.weight"][:, hidden:]), dim=1
        )
    tensors = {f"{layer}.{key}": tensor.to(dtype) for key, tensor in own.items()}
    tensors[f"{layer}.embed_tokens.weight"] = torch.full_like(embedding, torch.nan)
    tensors[f"{layer}.shared_head.head.weight"] = torch.full_like(head, torch.nan)
    return tensors


def _tiny_glm_dir(root: Path, *, name: str, dtype: torch.dtype, seed: int, **overrides: object) -> Path:
    """Write a random Glm4MoeForCausalLM (GQA; one dense layer, then layers with experts) and return its folder."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    options: dict[str, object] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    config = Glm4MoeConfig(**options | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Glm4MoeForCausalLM(config)
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                torch.nn.init.normal_(parameter, mean=0.0 if key.endswith("bias") else 1.0, std=0.2)
    target_dir = root / name
    model.to(dtype=dtype).save_pretrained(target_dir)
    write_byte_tokenizer(target_dir, config.vocab_size)
    return target_dir
