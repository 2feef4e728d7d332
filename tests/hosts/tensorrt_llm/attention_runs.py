"""A layer over pools of NaN, the libraries behind it, and what its rows ought to be: plain attention in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.hosts.tensorrt_llm.pools import FakeManager, row_of
from trtllm_tree.attention.cascade import TreeCascadeRows
from trtllm_tree.hosts.tensorrt_llm import attention
from trtllm_tree.hosts.tensorrt_llm.kv import TrtllmKVPool
from trtllm_tree.hosts.tensorrt_llm.step import TreeStep
from trtllm_tree.kernels.tree_ancestors import tree_ancestors

FP8 = torch.float8_e4m3fn
LAYER = 1
BLOCKS = [[5, 0, 3, 8], [1, 4, 7], [2, 6, 9]]
PREFIX = [6, 0, 5]
PARENTS = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 2]]
TABLE = 40


class InputType(IntEnum):
    mixed = 0
    context_only = 1
    generation_only = 2


@dataclass
class Args:
    output: Any
    attention_input_type: InputType = InputType.mixed
    out_scale: Any = None
    attention_window_size: Any = None
    attention_sinks: Any = None
    attention_mask_data: Any = None
    quant_q_buffer: Any = None


class Base:
    """The registry's base class, as far as it is used."""

    def __init__(self, attn):
        self.attn = attn

    @classmethod
    def is_available(cls, attn):
        return cls._is_available(attn)

    @classmethod
    def _is_available(cls, attn):
        return True

    def _is_supported(self, q, k, v, metadata, forward_args, *, phase=None) -> bool:
        return True

    def is_supported(self, q, k, v, metadata, forward_args, *, phase=None):
        return self._is_supported(q, k, v, metadata, forward_args, phase=phase)


class Other(Base):
    """A library behind ours: notes its calls, and gives 3."""

    phases = (0, 1, 2)
    calls: ClassVar[list[tuple[int, torch.Tensor]]] = []

    def _is_supported(self, q, k, v, metadata, forward_args, *, phase=None):
        return int(forward_args.attention_input_type) in self.phases

    def forward(self, q, k, v, metadata, forward_args):
        type(self).calls.append((int(forward_args.attention_input_type), q))
        forward_args.output.fill_(3.0)


@dataclass
class Layer:
    """One layer over one pool, and what its rows are meant to be."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    rope_dim: int = 8
    style: str = "rope_gpt_neox"
    generation: int = 1
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    q_scaling: float = 1.5
    device: str = "cpu"
    page: int = 4
    libraries: list[type] = field(default_factory=lambda: [Other])

    def __post_init__(self) -> None:
        torch.manual_seed(self.dim + self.rope_dim)
        shapes = [(self.kv_heads, self.dim)] * 3
        self.manager = FakeManager(
            shapes,
            num_blocks=10,
            generation=self.generation,
            dtype=self.kv_dtype,
            device=self.device,
            page=self.page,
        )
        self.pool = TrtllmKVPool(self.manager, [0, 1, 2], max_batch=4, device=self.device)
        angles = torch.outer(torch.arange(TABLE), 1 / 7.0 ** (torch.arange(self.rope_dim // 2)))
        # A magnitude other than 1, as YaRN's.
        pairs = 1.1 * torch.stack((angles.cos(), angles.sin()), dim=-1)
        self.attn = SimpleNamespace(
            layer_idx=LAYER,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            q_scaling=self.q_scaling,
            is_mla_enable=False,
            rope_params=SimpleNamespace(dim=self.rope_dim),
            rotary_cos_sin=pairs.reshape(1, -1).float().to(self.device) if self.rope_dim else None,
            position_embedding_type=SimpleNamespace(name=self.style if self.rope_dim else "learned_absolute"),
        )
        Other.calls.clear()
        # As in the registry, ours is one of the enabled ones itself.
        enabled: list[type] = []
        fmha = attention._fmha_class(Base, lambda: enabled, "_is_available", "_is_supported")
        enabled += [fmha, *self.libraries]
        self.fmha = fmha(self.attn)

    def turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Rows [H, D] by complex numbers, in float64."""
        x = x.double().cpu()
        if not self.rope_dim:
            return x
        half = self.rope_dim // 2
        turn = torch.view_as_complex(self.attn.rotary_cos_sin.view(TABLE, half, 2)[position].double().cpu())
        head = x[:, : self.rope_dim]
        pairs = (
            head.view(-1, half, 2) if self.style == "rope_gptj" else head.view(-1, 2, half).transpose(1, 2)
        )
        pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        head = pairs.flatten(1) if self.style == "rope_gptj" else pairs.transpose(1, 2).flatten(1)
        return torch.cat((head, x[:, self.rope_dim :]), dim=1)

    def as_cached(self, x: torch.Tensor) -> torch.Tensor:
        """What the cache makes of a row in float64."""
        x = x.to(self.dtype).float()
        return (x.clamp(-448, 448) if self.kv_dtype == FP8 else x).to(self.kv_dtype).double()

    def fill_prefix(self, prefix: Sequence[int]) -> None:
        for row, length in enumerate(prefix):
            for position in range(length):
                for kind in range(2):
                    value = self.as_cached(torch.randn(self.kv_heads, self.dim))
                    row_of(self.manager, LAYER, BLOCKS[row], position, kind).copy_(value)

    def qkv(self, rows: int) -> torch.Tensor:
        wide = (self.heads + 2 * self.kv_heads) * self.dim
        return torch.randn(rows, wide).to(self.dtype).to(self.device)

    def expected(
        self,
        qkv: torch.Tensor,
        step: TreeStep,
        seen: Sequence[Sequence[Sequence[int]]],
        window: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Attention of every row over its prefix and the window columns that it sees; a column is a row of `window`."""
        batch, num_rows = step.positions.shape
        fused = qkv.view(batch, num_rows, -1, self.dim)
        out = torch.empty(batch, num_rows, self.heads, self.dim, dtype=torch.float64)
        groups = self.heads // self.kv_heads
        for b in range(batch):
            prefix = int(step.rows.prefix_lens[b])
            past = [
                [
                    row_of(self.manager, LAYER, BLOCKS[b], position, kind).double().cpu()
                    for position in range(prefix)
                ]
                for kind in range(2)
            ]
            for r in range(num_rows):
                q = self.turned(fused[b, r, : self.heads], int(step.positions[b, r])).to(self.dtype).double()
                columns = [window[b][column] for column in seen[b][r]]
                keys, values = list(past[0]), list(past[1])
                for column in columns:
                    k = fused[b, column, self.heads : self.heads + self.kv_heads]
                    keys.append(self.as_cached(self.turned(k, int(step.positions[b, column]))))
                    values.append(
                        self.as_cached(fused[b, column, self.heads + self.kv_heads :].double().cpu())
                    )
                scale = 1 / (math.sqrt(self.dim) * self.q_scaling)
                for head in range(self.heads):
                    kv_head = head // groups
                    scores = torch.stack([key[kv_head] @ q[head] for key in keys]) * scale
                    out[b, r, head] = scores.softmax(0) @ torch.stack([value[kv_head] for value in values])
        return out.flatten(0, 1).flatten(1)

    def run(
        self,
        qkv: torch.Tensor,
        metadata: Any,
        *,
        dtype: torch.dtype | None = None,
        split: bool = False,
        **args,
    ) -> Any:
        output = torch.full(
            (qkv.shape[0], self.heads * self.dim), float("nan"), dtype=torch.float32, device=self.device
        ).to(dtype or self.dtype)
        parts: tuple[Any, Any, Any] = (qkv, None, None)
        if split:
            widths = [heads * self.dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
            q, k, v = qkv.split(widths, dim=-1)
            parts = (q, k, v)
        self.fmha.forward(*parts, metadata, Args(output=output, **args))
        return output


def metadata(contexts: int = 0, context_rows: int = 0, generations: int = 3, **more) -> SimpleNamespace:
    return SimpleNamespace(
        num_contexts=contexts,
        num_ctx_tokens=context_rows,
        num_generations=generations,
        max_num_requests=4,
        max_seq_len=24,
        spec_decoding_position_offsets=None,
        **more,
    )


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path


def verify_step(layer: Layer, *, behind: int = -1) -> tuple[TreeStep, list[list[list[int]]]]:
    parents = torch.tensor(PARENTS, dtype=torch.int32, device=layer.device)
    depths, mask = tree_ancestors(parents)
    prefix = torch.tensor(PREFIX, dtype=torch.int32, device=layer.device)
    nodes = len(PARENTS[0])
    tables = layer.pool.load_tables(layer.manager.offsets(BLOCKS, behind=behind), slice(0, 3), prefix + nodes)
    rows = TreeCascadeRows(prefix_lens=prefix, mask=mask, window=nodes, max_prefix_len=24)
    step = TreeStep(
        mode="verify",
        pool=layer.pool,
        rows=rows,
        positions=(prefix.unsqueeze(1) + depths).long(),
        write_slots=layer.pool.write_slots(prefix, tables, nodes),
        page_tables=tables,
    )
    seen = [[ancestors(tree, node) for node in range(nodes)] for tree in PARENTS]
    return step, seen
