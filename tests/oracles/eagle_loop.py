"""A slow EAGLE3 loop over a known greedy trajectory: dense, no cache, no batch, one path at a time.

Shares nothing with the product: the draft head is plain matrix products over the checkpoint's tensors, every
lane recomputes its own path, the tree is grown and cut in Python lists. Because greedy verification keeps exactly
the candidates that the target would say anyway, walking a tree along the target's trajectory gives the accepted
length of a real verify step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class Round:
    """One round: the tree as (token, parent) by node, and how many tokens tree and chain would keep."""

    tokens: list[int]
    parents: list[int]
    tree_accept: int
    chain_accept: int
    contains_chain: bool


class SlowHead:
    """The draft head over whole sequences, float32."""

    def __init__(self, head_dir: Path, embedding: torch.Tensor) -> None:
        self.config = json.loads((head_dir / "config.json").read_text())
        self.w = {
            name: t if t.dtype == torch.int64 else t.float()
            for name, t in load_file(head_dir / "model.safetensors").items()
        }
        self.embedding = embedding.float()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.w[name]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        dim = self.config["head_dim"]
        theta = self.config["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angle = (positions.double()[:, None] * theta).float()  # [T, D/2]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.w["fc.weight"].T

    def rows(
        self,
        tokens: list[int],
        hidden: torch.Tensor,
        start: int,
        past: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Rows at positions start, start + 1, ... behind `past` keys and values; returns pre-norm rows and all K, V."""
        c, p = self.config, "midlayer."
        count, heads, kv_heads, dim = (
            len(tokens),
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        embedded = self._norm(self.embedding[tokens], p + "input_layernorm.weight")
        x = torch.cat([embedded, self._norm(hidden, p + "hidden_norm.weight")], dim=-1)
        q, k, v = (x @ self.w[f"{p}self_attn.{n}_proj.weight"].T for n in "qkv")
        positions = torch.arange(start, start + count)
        q = self._rotate(q.view(count, heads, dim), positions)
        k, v = self._rotate(k.view(count, kv_heads, dim), positions), v.view(count, kv_heads, dim)
        if past is not None:
            k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
        wide_k, wide_v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("thd,shd->hts", q, wide_k) * dim**-0.5
        seen = torch.arange(k.shape[0])[None, :] <= torch.arange(k.shape[0] - count, k.shape[0])[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hts,shd->thd", weights, wide_v).reshape(count, heads * dim)
        hidden = hidden + out @ self.w[p + "self_attn.o_proj.weight"].T
        y = self._norm(hidden, p + "post_attention_layernorm.weight")
        gate, up = (y @ self.w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return hidden + (torch.nn.functional.silu(gate) * up) @ self.w[p + "mlp.down_proj.weight"].T, (k, v)

    def best(self, row: torch.Tensor, count: int) -> list[tuple[float, int]]:
        """The `count` best (log-probability, target token) behind a pre-norm row."""
        logits = self._norm(row, "norm.weight") @ self.w["lm_head.weight"].T
        scores, ids = logits.log_softmax(-1).topk(count)
        return [(s, i + int(self.w["d2t"][i])) for s, i in zip(scores.tolist(), ids.tolist(), strict=True)]


def run(
    head: SlowHead,
    features: torch.Tensor,
    tokens: list[int],
    num_prompt: int,
    *,
    topk: int,
    steps: int,
    nodes: int,
) -> list[Round]:
    """Every round of drafting a trajectory.

    Args:
        features: [T, F], the target's features at every position of `tokens`.
        tokens: prompt and greedy continuation.
        num_prompt: tokens of the prompt.
    """
    rounds, length = [], num_prompt + 1  # the first token comes from prefill
    while length < len(tokens):
        rounds.append(_round(head, features, tokens, length, topk, steps, nodes))
        length += rounds[-1].tree_accept
    return rounds


def chain_forwards(
    head: SlowHead, features: torch.Tensor, tokens: list[int], num_prompt: int, *, steps: int
) -> int:
    """Target forwards when drafting chains."""
    forwards, length = 0, num_prompt + 1
    while length < len(tokens):
        length += _round(head, features, tokens, length, 1, steps, steps + 1).chain_accept
        forwards += 1
    return forwards


def _round(
    head: SlowHead, features: torch.Tensor, tokens: list[int], length: int, topk: int, steps: int, nodes: int
) -> Round:
    # Row i takes token i + 1 and the feature of position i; the last row takes the root.
    rows, past = head.rows(tokens[1:length], head.fuse(features[: length - 1]), 0, None)
    # An entry: (cumulative score, entry id, parent entry or -1, token).
    entries: list[tuple[float, int, int, int]] = []
    lanes = [(0.0, -1, rows[-1], past)]
    for step in range(steps):
        grown = []
        for score, entry, row, seen in lanes:
            for child, token in head.best(row, topk):
                item = (score + child, len(entries), entry, token)
                entries.append(item)
                grown.append((item, row, seen))
        grown.sort(key=lambda g: (-g[0][0], g[0][1]))
        lanes = []
        for (score, entry, _, token), row, seen in grown[:topk]:
            if step + 1 < steps:
                out, keys = head.rows([token], row[None], length - 1 + step, seen)
                lanes.append((score, entry, out[-1], keys))
    kept = sorted(entries, key=lambda e: (-e[0], e[1]))[: nodes - 1]
    node_tokens, parents = _number(kept, tokens[length - 1])
    chain = _chain_of(head, rows[-1], past, length, steps)
    continuation = tokens[length:]
    return Round(
        tokens=node_tokens,
        parents=parents,
        tree_accept=_walk(node_tokens, parents, continuation),
        chain_accept=min(1 + _common(chain, continuation), len(continuation)),
        contains_chain=_contains(node_tokens, parents, chain),
    )


def _number(kept: list[tuple[float, int, int, int]], root: int) -> tuple[list[int], list[int]]:
    """Depth first, best child first."""
    tokens, parents = [root], [-1]

    def visit(entry: int, node: int) -> None:
        for _, child, parent, token in kept:
            if parent == entry:
                tokens.append(token)
                parents.append(node)
                visit(child, len(tokens) - 1)

    visit(-1, 0)
    return tokens, parents


def _chain_of(
    head: SlowHead, row: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor], length: int, steps: int
) -> list[int]:
    chain: list[int] = []
    for step in range(steps):
        token = head.best(row, 1)[0][1]
        chain.append(token)
        if step + 1 < steps:
            out, past = head.rows([token], row[None], length - 1 + step, past)
            row = out[-1]
    return chain


def _child(tokens: list[int], parents: list[int], node: int, token: int) -> int | None:
    return next((j for j in range(node + 1, len(tokens)) if parents[j] == node and tokens[j] == token), None)


def _walk(tokens: list[int], parents: list[int], continuation: list[int]) -> int:
    """Tokens kept: matched candidates and the target's own next token, up to the trajectory's end."""
    node, kept = 0, 1
    for token in continuation:
        child = _child(tokens, parents, node, token)
        if child is None:
            break
        node, kept = child, kept + 1
    return min(kept, len(continuation))


def _contains(tokens: list[int], parents: list[int], chain: list[int]) -> bool:
    node: int | None = 0
    for token in chain:
        node = None if node is None else _child(tokens, parents, node, token)
    return node is not None


def _common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
