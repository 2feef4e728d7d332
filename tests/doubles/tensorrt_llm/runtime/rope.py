"""RoPE: its parameters, the table that fused layers carry, and the module of layers that rotate by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .layout import device


@dataclass
class RopeParams:
    """`dim` 0 means that the layer's backend does not rotate."""

    dim: int = 0
    theta: float = 10000.0
    max_positions: int = 1024

    @staticmethod
    def from_config(config: Any) -> RopeParams:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        theta, parameters = (
            getattr(config, "rope_theta", None),
            getattr(config, "rope_parameters", None) or {},
        )
        if theta is None:
            theta = parameters.get("rope_theta", 10000.0)
        dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        return RopeParams(dim, float(theta), config.max_position_embeddings)

    def create_rope_const_params(self, interleave: bool = True) -> tuple[Tensor | None, Tensor | None]:
        """Frequencies float32 [dim / 2], and cos/sin pairs [1, positions * dim]; else [positions, 2, dim / 2]."""
        if self.dim == 0:
            return None, None
        exponent = torch.arange(0, self.dim, 2, dtype=torch.int64, device=device()).float() / self.dim
        inv_freq = 1.0 / self.theta**exponent
        angles = torch.arange(self.max_positions, device=device()).float()[:, None] * inv_freq
        if interleave:
            return inv_freq, torch.stack((angles.cos(), angles.sin()), dim=-1).reshape(1, -1)
        return inv_freq, torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, dim: int) -> Tensor:
    """Rotate the first `dim` channels of [T, heads, D] by halves (GPT-NeoX), with a table of cos/sin pairs."""
    x, rest = x[..., :dim], x[..., dim:]
    half = dim // 2
    cos, sin = cos_sin.view(-1, half, 2)[positions.long()].unsqueeze(1).unbind(-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def rotate_pairs(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate neighbouring channels of [T, heads, D] (GPT-J, latent attention), with the same kind of table."""
    cos, sin = cos_sin.view(-1, x.shape[-1] // 2, 2)[positions.long()].unsqueeze(1).unbind(-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class RotaryEmbedding(nn.Module):
    """RoPE outside of the attention library."""

    def __init__(self, rope_params: RopeParams, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.rotary_dim = head_dim, rope_params.dim
        self.rotary_cos_sin = rope_params.create_rope_const_params(interleave=False)[1]

    def forward(self, position_ids: Tensor, targets: list[Tensor]) -> list[Tensor]:
        assert self.rotary_cos_sin is not None
        pairs = self.rotary_cos_sin.transpose(1, 2).contiguous()
        return [
            rotate(
                x.unflatten(-1, (-1, self.head_dim)), position_ids.view(-1), pairs, self.rotary_dim
            ).flatten(-2)
            for x in targets
        ]
