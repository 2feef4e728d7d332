"""A tiny hybrid for the runtime double: attention, recurrent and MLP layers, and a head that often agrees with it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.builders import tiny_eagle3_dir

KINDS = ("linear_attention", "mlp", "full_attention", "linear_attention", "mlp", "full_attention")
_VOCAB, _HEADS, _KV_HEADS, _INNER = 300, 4, 2, 128


def hybrid_pair(root: Path, *, kinds: tuple[str, ...] = KINDS, hidden_size: int = 64) -> tuple[Path, Path]:
    """Write a random target and head that choose among the same few tokens, so that drafts are often accepted.

    With a `hidden_size` of 256 they are of a size that our kernels take.
    """
    target = root / "hybrid"
    target.mkdir()
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": hidden_size,
        "vocab_size": _VOCAB,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": hidden_size // _HEADS,
        "intermediate_size": _INNER,
        "layer_norm_epsilon": 1e-5,
        "layers_block_type": list(kinds),
        "num_hidden_layers": len(kinds),
        "max_position_embeddings": 2048,
        "mamba_num_heads": 4,
        "ssm_state_size": 16,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = _weights(kinds, hidden_size)
    head = tiny_eagle3_dir(root, target)
    drafts = load_file(head / "model.safetensors")
    likely = torch.arange(4) * 20
    _favour_rows(drafts, likely)
    _favour_rows(weights, likely + drafts["d2t"][likely])
    save_file(drafts, head / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target, head


def hybrid_mtp_dir(root: Path, *, hidden_size: int = 64) -> Path:
    """The target of `hybrid_pair` with an MTP layer of attention and an MLP, which has no head beside it."""
    target, _ = hybrid_pair(root, hidden_size=hidden_size)
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    more = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*-"}
    path.write_text(json.dumps(config | more), encoding="utf-8")
    weights, generator = load_file(target / "model.safetensors"), torch.Generator().manual_seed(8)
    for layer, kind in enumerate(("full_attention", "mlp")):
        source = f"model.layers.{KINDS.index(kind)}."
        named = {name.removeprefix(source): weight for name, weight in weights.items() if source in name}
        for name, weight in named.items():
            drawn = 0.2 * torch.randn(weight.shape, generator=generator)
            weights[f"mtp.layers.{layer}.{name}"] = drawn if weight.dim() > 1 else 1 + drawn
    for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        drawn = 0.2 * torch.randn(hidden_size, generator=generator)
        weights[f"mtp.layers.{name}.weight"] = 1 + drawn
    joined = 0.2 * torch.randn(hidden_size, 2 * hidden_size, generator=generator)
    weights["mtp.layers.0.eh_proj.weight"] = joined
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _weights(kinds: tuple[str, ...], hidden: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    rows, inner = hidden * _KV_HEADS // _HEADS, _INNER
    mixers = {
        # States that last for several tokens: a wrong parent is not forgotten.
        "linear_attention": lambda: {
            "in_proj.weight": draw(hidden, hidden),
            "out_proj.weight": draw(hidden, hidden),
            "decay": 2.0 + draw(hidden),
        },
        "full_attention": lambda: {
            "q_proj.weight": draw(hidden, hidden),
            "k_proj.weight": draw(rows, hidden),
            "v_proj.weight": draw(rows, hidden),
            "o_proj.weight": draw(hidden, hidden),
        },
        "mlp": lambda: {
            "gate_proj.weight": draw(inner, hidden),
            "up_proj.weight": draw(inner, hidden),
            "down_proj.weight": draw(hidden, inner),
        },
    }
    weights = {
        "model.embed_tokens.weight": draw(_VOCAB, hidden),
        "model.norm_f.weight": torch.ones(hidden),
        "lm_head.weight": draw(_VOCAB, hidden),
    }
    for layer, kind in enumerate(kinds):
        weights[f"model.layers.{layer}.norm.weight"] = torch.ones(hidden)
        for name, weight in mixers[kind]().items():
            weights[f"model.layers.{layer}.mixer.{name}"] = weight
    return weights


def _favour_rows(weights: dict[str, torch.Tensor], rows: torch.Tensor) -> None:
    kept = weights["lm_head.weight"][rows[::2]]
    weights["lm_head.weight"] *= 0.1
    # Opposite pairs: one of each is always above the others.
    weights["lm_head.weight"][rows] = torch.stack((kept, -kept), dim=1).flatten(0, 1)
