"""What a target's MTP layer drafts, computed slowly: whole sequences, one path at a time, no cache, no batch.

Shares nothing with the product, nor with transformers' MtpModel: the layer's decoder layer is read as one more layer of
the target, by transformers' eager attention under a causal mask, and what joins and norms are plain products over the
checkpoint's tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.oracles import path_tree


class SlowMtp:
    """A target and its MTP layer in float32.

    Args:
        target_dir: the target's folder, with the layer's weights in one model.safetensors.
        topk: children of a path.
    """

    def __init__(self, target_dir: Path, topk: int) -> None:
        self._topk = topk
        options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
        self._target: Any = AutoModelForCausalLM.from_pretrained(target_dir, local_files_only=True, **options)
        self._eps = self._target.config.rms_norm_eps
        depth = self._target.config.num_hidden_layers
        deeper: Any = AutoModelForCausalLM.from_pretrained(
            target_dir, local_files_only=True, num_hidden_layers=depth + 1, **options
        )
        self._block, self._rotary = deeper.model.layers[depth], deeper.model.rotary_emb
        prefix = f"model.layers.{depth}."
        weights = load_file(target_dir / "model.safetensors")
        self._w = {
            key.removeprefix(prefix): tensor.float()
            for key, tensor in weights.items()
            if key.startswith(prefix)
        }

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._w[f"{name}.weight"]

    @torch.inference_mode()
    def target_rows(self, tokens: list[int]) -> torch.Tensor:
        """The target's rows [T, H] behind its final norm."""
        return self._target.model(torch.tensor([tokens])).last_hidden_state[0]

    @torch.inference_mode()
    def rows(self, next_tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """The layer's normed rows [T, H] at positions 0, 1, ...: row i takes token i + 1 and hidden row i."""
        embedded = self._target.model.embed_tokens.weight[next_tokens]
        joined = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), dim=-1)
        x = (joined @ self._w["eh_proj.weight"].T)[None]
        count = len(next_tokens)
        mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
        positions = torch.arange(count)[None]
        out = self._block(x, attention_mask=mask, position_embeddings=self._rotary(x, positions))
        return self._norm(out[0], "shared_head.norm")

    def best(self, tokens: list[int], path: path_tree.Path) -> list[tuple[float, int]]:
        """The best children of a path of drafts behind `tokens`, the last of which is the root."""
        hidden, nexts = self.target_rows(tokens[:-1]), tokens[1:]
        out = self.rows(nexts, hidden)
        for token in path:
            # A draft's hidden row is what the layer gave for the token before.
            hidden, nexts = torch.cat((hidden, out[-1:])), [*nexts, token]
            out = self.rows(nexts, hidden)
        logits = out[-1] @ self._target.lm_head.weight.detach().T
        scores, ids = logits.log_softmax(-1).topk(self._topk)
        return list(zip(scores.tolist(), ids.tolist(), strict=True))

    def tree(self, tokens: list[int], *, num_steps: int, num_nodes: int) -> path_tree.PathTree:
        """The tree drafted behind `tokens`."""
        return path_tree.draft(
            lambda path: self.best(tokens, path),
            tokens[-1],
            topk=self._topk,
            num_steps=num_steps,
            num_nodes=num_nodes,
        )

    def chain(self, tokens: list[int], *, num_steps: int) -> list[int]:
        """The chain drafted behind `tokens`, its root first."""
        return path_tree.greedy_chain(lambda path: self.best(tokens, path), tokens[-1], num_steps=num_steps)
