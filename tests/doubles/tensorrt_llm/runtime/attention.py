"""The TRTLLM attention backend of one layer, and the module around it that projects and, unfused, rotates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .forward_args import AttentionForwardArgs, AttentionInputType
from .kv_cache import FP8
from .latent import write_latent
from .layout import NEW, device
from .manager import FmhaManager
from .model_parts import RMSNorm
from .rope import RopeParams, RotaryEmbedding, rotate_pairs


@dataclass
class MLAParams:
    """Latent attention's sizes."""

    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    predicted_tokens_per_seq: int = 1
    rope_append: bool = True


@dataclass
class PositionalEmbeddingParams:
    rope: RopeParams | None = None
    is_neox: bool = True


class TrtllmAttention:
    """State of a layer, and its libraries. `pos_embd_params` are given where RoPE is fused."""

    def __init__(
        self,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        quant_config: Any = None,
        q_scaling: float | None = None,
        pos_embd_params: PositionalEmbeddingParams | None = None,
        mla_params: MLAParams | None = None,
        attention_chunk_size: int | None = None,
    ) -> None:
        self.layer_idx, self.num_heads, self.head_dim = layer_idx, num_heads, head_dim
        self.num_kv_heads = num_kv_heads or num_heads
        self.q_scaling = q_scaling or 1.0
        self.quant_config, self.attention_chunk_size = quant_config, attention_chunk_size
        self.rope_params = (pos_embd_params and pos_embd_params.rope) or RopeParams()
        self.rotary_inv_freq, self.rotary_cos_sin = self.rope_params.create_rope_const_params()
        self.position_embedding_type = "rope_gpt_neox" if pos_embd_params else "learned_absolute"
        self.is_mla_enable, self.mla_params = mla_params is not None, mla_params or MLAParams()
        self.predicted_tokens_per_seq = self.mla_params.predicted_tokens_per_seq
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rope_append"):
            setattr(self, name, getattr(self.mla_params, name) if self.is_mla_enable else None)
        self.v_head_dim = self.mla_params.v_head_dim if self.is_mla_enable else head_dim
        self.kv_scale_quant_orig = self.kv_scale_orig_quant = torch.ones(1, device=device())
        self.has_fp8_kv_cache = bool(quant_config is not None and quant_config.kv_cache_dtype == FP8)
        self.local_layer_idx: int | None = None
        self.skip_correction_threshold = 0.0
        self.update_quant_config(quant_config)

    def update_quant_config(self, new_quant_config: Any) -> None:
        """The libraries are looked up again: here they are made, once in `__init__` and once per module."""
        self.quant_config = new_quant_config
        self._fmha_manager = FmhaManager(self)

    def get_local_layer_idx(self, metadata: Any) -> int:
        if self.local_layer_idx is None:
            self.local_layer_idx = metadata.kv_cache_manager.layer_offsets[self.layer_idx]
        return self.local_layer_idx

    def out_head_size(self, is_gen_only: bool) -> int:
        if not self.is_mla_enable:
            return self.head_dim
        return self.mla_params.kv_lora_rank if is_gen_only else self.v_head_dim

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, metadata: Any,
        forward_args: AttentionForwardArgs | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Attend rows [T, ...]; returns [T, heads * channels]."""
        args = forward_args or AttentionForwardArgs(**kwargs)
        only_generation = args.attention_input_type == AttentionInputType.generation_only
        if args.output is None:
            args.output = q.new_empty(q.shape[0], self.num_heads * self.out_head_size(only_generation))
        if not self.is_mla_enable:
            width = self.num_heads + (2 * self.num_kv_heads if k is None else 0)
            assert q.shape[1] == width * self.head_dim, "neither fused QKV nor Q"
        args.is_fused_qkv = k is None
        args.kv_scale_orig_quant, args.kv_scale_quant_orig = (
            self.kv_scale_orig_quant,
            self.kv_scale_quant_orig,
        )
        self.local_layer_idx = self.get_local_layer_idx(metadata)
        if args.attention_window_size is None:
            args.attention_window_size = metadata.max_seq_len
        self._fmha_manager.select(self, q, k, v, metadata, args).forward(q, k, v, metadata, args)
        return args.output

    def mla_rope_generation(
        self,
        fused_q: Tensor,
        q_pe: Tensor,
        latent_cache: Tensor,
        metadata: Any,
        cu_q_seqlens: Any,
        cu_kv_seqlens: Any,
        fmha_scheduler_counter: Any,
        mla_bmm1_scale: Any,
        mla_bmm2_scale: Any,
        quant_q_buffer: Any,
    ) -> None:
        """Rotate generation rows: the tail of `fused_q`, and the rows of the cache."""
        first, count = metadata.num_contexts, metadata.num_generations
        rows = torch.arange(q_pe.shape[0], device=q_pe.device)
        length = q_pe.shape[0] // count
        request = first + torch.div(rows, length, rounding_mode="floor")
        places = metadata.kv_lens_cuda_runtime[request].long() - length + rows % length
        # Absolute positions by generation row, where they are given; rows lie where they lie all the same.
        told = metadata.helix_position_offsets
        positions = places if told is None else told[rows].long()
        rank = self.mla_params.kv_lora_rank
        fused_q[..., rank:] = rotate_pairs(q_pe, positions, self.rotary_cos_sin)
        write_latent(self, metadata, request, places, latent_cache, positions)

    @classmethod
    def support_fused_rope(cls) -> bool:
        return True

    @classmethod
    def support_fused_qkv(cls) -> bool:
        return True


class Attention(nn.Module):
    """Projections around a `TrtllmAttention`.

    Args:
        rope_fusion: whether the backend rotates; None for yes.
        input_size: channels of the input where they are not `hidden_size`.
        dense_bias: of the output, where it is not as the input's.
    """

    def __init__(
        self, *, hidden_size: int, num_attention_heads: int, num_key_value_heads: int, bias: bool,
        pos_embd_params: PositionalEmbeddingParams, layer_idx: int, dtype: torch.dtype, config: Any,
        head_dim: int | None = None, rope_fusion: bool | None = None, q_scaling: float = 1.0,
        input_size: int | None = None, dense_bias: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, head_dim or hidden_size // num_attention_heads
        self.num_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.q_size, self.kv_size = self.num_heads * self.head_dim, num_key_value_heads * self.head_dim
        place = {"dtype": dtype, "device": device()}
        self.qkv_proj = nn.Linear(
            input_size or hidden_size, self.q_size + 2 * self.kv_size, bias=bias, **place
        )
        dense_bias = bias if dense_bias is None else dense_bias
        self.o_proj = nn.Linear(self.q_size, hidden_size, bias=dense_bias, **place)
        self.rope_fusion = True if rope_fusion is None else rope_fusion
        self.rotary_emb = None
        if not self.rope_fusion:
            assert pos_embd_params.rope is not None
            self.rotary_emb = RotaryEmbedding(pos_embd_params.rope, self.head_dim)
        self.attn = TrtllmAttention(
            layer_idx, self.num_heads, self.head_dim, num_key_value_heads,
            quant_config=config.cache_quant(), q_scaling=q_scaling,
            pos_embd_params=pos_embd_params if self.rope_fusion else None,
        )  # fmt: skip

    def forward(
        self, position_ids: Tensor, hidden_states: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> Tensor:
        qkv = self.qkv_proj(hidden_states)
        if self.rotary_emb is not None:
            if NEW:
                position_ids = _tree_positions(position_ids, attn_metadata)
            q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
            q, k = self.rotary_emb(position_ids, self.normed(q, k))
            qkv = torch.cat((q, k, v), dim=-1)
        output = self.attn.forward(qkv, None, None, attn_metadata, forward_args=AttentionForwardArgs())
        return self.o_proj(output)

    def normed(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Of modules that rotate by themselves: queries and keys before that."""
        return [q, k]


class QKNormRoPEAttention(Attention):
    """Norms queries and keys by head, and rotates them outside of the library."""

    def __init__(self, *, eps: float, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(dtype=dtype, **options | {"rope_fusion": False})
        self.q_norm, self.k_norm = (
            RMSNorm(hidden_size=self.head_dim, eps=eps, dtype=dtype) for _ in range(2)
        )

    def normed(self, q: Tensor, k: Tensor) -> list[Tensor]:
        heads = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k))
        norms = (self.q_norm, self.k_norm)
        return [norm(x).flatten(-2) for norm, x in zip(norms, heads, strict=True)]


def _tree_positions(position_ids: Tensor, meta: Any) -> Tensor:
    """What newer modules with unfused RoPE do to a dynamic tree's rows: committed length plus offset, in place."""
    offsets, generations = meta.spec_decoding_position_offsets, meta.num_seqs - meta.num_contexts
    if not (meta.is_spec_dec_dynamic_tree and meta.use_spec_decoding and generations > 0):
        return position_ids
    if offsets is None or offsets.dim() != 1:
        return position_ids
    length = int(meta.seq_lens[meta.num_contexts])
    base = meta.kv_lens_cuda[meta.num_contexts : meta.num_seqs] - length
    tree = base[:, None] + offsets[: generations * length].view(generations, length)
    position_ids.view(-1)[meta.num_ctx_tokens : meta.num_ctx_tokens + generations * length] = tree.reshape(-1)
    return position_ids
