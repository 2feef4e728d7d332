"""Tiny targets with an MTP layer, and what that layer drafts by plain matrix products over the checkpoint's tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from tests.builders import write_byte_tokenizer
from tests.hosts.tensorrt_llm.tree_runs import favour_rows
from tests.oracles.draft_tree import DraftTreeOracle

VOCAB, LAYERS = 300, 3


def glm_dir(root: Path, *, hidden_size: int = 64, use_qk_norm: bool = False, seed: int = 0) -> Path:
    """Write a random Glm4MoeForCausalLM with one MTP layer, in the names of GLM-4.5's checkpoints.

    Target and layer choose among the same few tokens, so that drafts are often accepted. With a `hidden_size` of 256
    heads are of a size that our kernels take.
    """
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    target = root / "glm"
    config = Glm4MoeConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=use_qk_norm,
        max_position_embeddings=2048,
        initializer_range=0.2,
        num_nextn_predict_layers=1,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Glm4MoeForCausalLM(config)
        # Transformers knows no MTP layers: one of its decoder layers, and what is around it.
        layer = Glm4MoeForCausalLM(config).model.layers[LAYERS - 1]
        extra = {
            "eh_proj.weight": 0.2 * torch.randn(hidden_size, 2 * hidden_size),
            **{f"{name}.weight": 1 + 0.3 * torch.randn(hidden_size) for name in ("enorm", "hnorm")},
            "shared_head.norm.weight": 1 + 0.3 * torch.randn(hidden_size),
        }
        model.model.layers.append(layer)
        # Norms of ones hide which of them was applied.
        norms = [p for name, p in model.named_parameters() if "model.norm." in name or "_norm." in name]
        for weight in norms:
            torch.nn.init.normal_(weight, 1.0, 0.3)
    model.save_pretrained(target)
    raw = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(
        json.dumps(raw | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}), encoding="utf-8"
    )
    path = target / "model.safetensors"
    weights = load_file(path)
    prefix = f"model.layers.{LAYERS}."
    assert f"{prefix}mlp.experts.0.gate_proj.weight" in weights, sorted(weights)
    weights |= {f"{prefix}{name}": tensor for name, tensor in extra.items()}
    # Real checkpoints repeat them.
    weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    favour_rows(path, "lm_head.weight", torch.tensor([5, 60, 140, 222]))
    weights = load_file(path)
    weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    write_byte_tokenizer(target, VOCAB)
    return target


class SlowGlmMtp:
    """The MTP layer over whole sequences, one path at a time: no cache, no tree, no batch."""

    def __init__(self, target: Path) -> None:
        self.config: dict[str, Any] = json.loads((target / "config.json").read_text(encoding="utf-8"))
        self.w = load_file(target / "model.safetensors")
        self.prefix = f"model.layers.{self.config['num_hidden_layers']}."

    def rows(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """Rows 0 .. T-1 of one sequence: `tokens[i]` follows position i, `hidden` [T, H] is position i's."""
        c, p = self.config, self.prefix
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        embedded = self._norm(self.w["model.embed_tokens.weight"][list(tokens)], "enorm")
        joined = torch.cat((embedded, self._norm(hidden, "hnorm")), dim=-1)
        x = joined @ self.w[f"{p}eh_proj.weight"].T
        normed = self._norm(x, "input_layernorm")
        q, k, v = (
            (
                normed @ self.w[f"{p}self_attn.{n}_proj.weight"].T + self.w[f"{p}self_attn.{n}_proj.bias"]
            ).unflatten(-1, (-1, dim))
            for n in "qkv"
        )
        if c["use_qk_norm"]:
            q, k = self._norm(q, "self_attn.q_norm"), self._norm(k, "self_attn.k_norm")
        q, k = self._rotate(q), self._rotate(k)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * dim**-0.5
        scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(1)
        attended = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ self.w[f"{p}self_attn.o_proj.weight"].T
        x = x + self._experts(self._norm(x, "post_attention_layernorm"))
        return self._norm(x, "shared_head.norm")

    def scores(self, row: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of one row [H] of `rows`."""
        return (row @ self.w["lm_head.weight"].T).log_softmax(-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.w[f"{self.prefix}{name}.weight"]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """The first half of the channels alone."""
        rope = self.config["rope_parameters"]
        dim = int(self.config["head_dim"] * rope["partial_rotary_factor"])
        theta = rope["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angle = (torch.arange(x.shape[0]).double()[:, None] * theta).float()
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        low, high, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (
            self.w[f"{self.prefix}mlp.{name}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        c, out = self.config, []
        for row in x:
            share = (self.w[f"{self.prefix}mlp.gate.weight"] @ row).sigmoid()
            chosen = (share + self.w[f"{self.prefix}mlp.gate.e_score_correction_bias"]).topk(
                c["num_experts_per_tok"]
            )
            total = sum(float(share[e]) for e in chosen.indices)
            mixed = self._mlp(row, "shared_experts")
            for e in chosen.indices.tolist():
                weight = float(share[e]) / total * c["routed_scaling_factor"]
                mixed = mixed + weight * self._mlp(row, f"experts.{e}")
            out.append(mixed)
        return torch.stack(out)


class SlowLayer(Protocol):
    """See `SlowGlmMtp`."""

    def rows(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor: ...

    def scores(self, row: torch.Tensor) -> torch.Tensor: ...


def slow_tree(
    layer: SlowLayer, tokens: Sequence[int], hidden: torch.Tensor, sizes: tuple[int, int, int]
) -> tuple[list[int], list[int]]:
    """The tree behind `tokens`, whose last one is the next root; `hidden` [T - 1, H] are the target's rows before it.

    Returns:
        Tokens and parents of its N nodes.
    """
    topk, steps, nodes = sizes
    oracle = DraftTreeOracle(topk, steps)
    first = layer.rows(tokens[1:], hidden)[-1]
    # Of each lane: its tokens, and the rows that its path handed on.
    lanes: list[tuple[list[int], list[torch.Tensor]]] = [([], [first])]
    for step in range(steps):
        if step:
            lanes = [
                _grown(layer, tokens, hidden, lanes[parent], oracle.entries[entry].token)
                for parent, entry in zip(oracle.parent_lanes[-1], oracle.lanes[-1], strict=True)
            ]
        best = [layer.scores(rows[-1]).topk(topk) for _, rows in lanes]
        oracle.grow([one.values.tolist() for one in best], [one.indices.tolist() for one in best])
    found = oracle.select(nodes, tokens[-1])
    return [node.token for node in found], [node.parent for node in found]


def _grown(
    layer: SlowLayer,
    tokens: Sequence[int],
    hidden: torch.Tensor,
    lane: tuple[list[int], list[torch.Tensor]],
    token: int,
) -> tuple[list[int], list[torch.Tensor]]:
    """The lane one token further: everything before it is run again."""
    path, rows = [*lane[0], token], lane[1]
    out = layer.rows([*tokens[1:], *path], torch.cat((hidden, torch.stack(rows))))
    return path, [*rows, out[-1]]
