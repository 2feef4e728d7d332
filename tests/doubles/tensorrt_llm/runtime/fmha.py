"""The attention libraries' base classes, one call's parameters, and the split of a call by phase."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

import torch

from .forward_args import AttentionInputType
from .layout import NEW


class FmhaPhase(str, Enum):
    CONTEXT = "context"
    GENERATION = "generation"


if NEW:

    @dataclass(slots=True)
    class FmhaParams:
        """One attention call; tensors by row are those of the phase, block offsets are the batch's."""

        fwd: Any = None
        attn: Any = None
        meta: Any = None
        layer_idx: int = -1
        local_layer_idx: int = -1
        num_heads: int = -1
        num_kv_heads: int = -1
        head_size: int = -1
        q_scaling: float = 1.0
        has_fp8_kv_cache: bool = False
        use_spec_decoding: bool = False
        is_spec_dec_tree: bool = True
        is_mla_enable: bool = False
        workspace: torch.Tensor | None = None
        output: torch.Tensor | None = None
        qkv_or_q: torch.Tensor | None = None
        k: torch.Tensor | None = None
        v: torch.Tensor | None = None
        sequence_length: torch.Tensor | None = None
        context_lengths: torch.Tensor | None = None
        host_past_key_value_lengths: torch.Tensor | None = None
        max_past_kv_length: int = 0
        num_seqs: int = 0
        num_requests: int = 0
        num_tokens: int = 0
        seq_offset: int = 0
        token_offset: int = 0
        input_seq_length: int = 0
        kv_factor: int = 1
        tokens_per_block: int = 0
        total_num_blocks: int = 0
        kv_cache_block_offsets: torch.Tensor | None = None
        host_kv_cache_pool_pointers: torch.Tensor | None = None
        host_kv_cache_pool_mapping: torch.Tensor | None = None
        rotary_inv_freq: torch.Tensor | None = None
        rotary_cos_sin: torch.Tensor | None = None
        spec_decoding_generation_lengths: torch.Tensor | None = None
        spec_decoding_position_offsets_for_cpp: torch.Tensor | None = None
        spec_decoding_packed_mask: torch.Tensor | None = None

    class Fmha:
        """Libraries override the hooks with an underscore."""

        def __init__(self, attn):
            self._attn_ref = weakref.ref(attn)

        @property
        def attn(self) -> Any:
            return self._attn_ref()

        @classmethod
        @final
        def is_available(cls, attn):
            return cls._is_available(attn)

        @classmethod
        def _is_available(cls, attn):
            return True

        @final
        def is_supported(self, q, k, v, metadata, forward_args, *, phase=None):
            return self._is_supported(q, k, v, metadata, forward_args, phase=phase)

        def _is_supported(self, q, k, v, metadata, forward_args, *, phase=None):
            return True

        def forward(self, q, k, v, metadata, forward_args):
            raise NotImplementedError

        def release(self) -> None: ...

else:

    @dataclass(slots=True)
    class FmhaParams:  # type: ignore[no-redef]
        """One attention call, by its older names."""

        attn: Any
        meta: Any
        fwd: Any
        workspace: torch.Tensor | None
        attention_input: torch.Tensor | None = None
        qkv_input: torch.Tensor | None = None
        key_input: torch.Tensor | None = None
        value_input: torch.Tensor | None = None
        context_buf: torch.Tensor | None = None
        sequence_lengths: torch.Tensor | None = None
        context_lengths: torch.Tensor | None = None
        input_seq_length: int = 0
        max_past_kv_length: int = 0
        num_tokens: int = 0
        seq_offset: int = 0
        tokens_per_block: int = 64
        kv_factor: int = 0
        total_num_blocks: int = 0
        batch_size: int = 0
        num_requests: int = 0
        spec_decoding_generation_lengths: torch.Tensor | None = None
        spec_decoding_position_offsets: torch.Tensor | None = None

    class Fmha:  # type: ignore[no-redef]
        """Libraries override the methods themselves."""

        def __init__(self, attn=None):
            self._attn_ref = weakref.ref(attn)

        @property
        def attn(self) -> Any:
            return self._attn_ref()

        @classmethod
        def is_available(cls, attn=None):
            return True

        def is_supported(self, q, k, v, metadata, forward_args):
            return True

        def forward(self, q, k, v, metadata, forward_args):
            raise NotImplementedError


class PhasedFmha(Fmha):
    """Hands context rows and generation rows of one call to different methods."""

    REQUIRES_PAGED_KV = True

    def __init__(self, attn):
        super().__init__(attn)
        self.kv_factor = 1 if attn.is_mla_enable else 2

    def forward(self, q, k, v, metadata, forward_args):
        kind = forward_args.attention_input_type
        assert metadata.kv_cache_block_offsets is not None, "paged KV is needed"
        only_generation = kind == AttentionInputType.generation_only
        contexts, generations = metadata.num_contexts, metadata.num_generations
        context_rows = 0 if only_generation else metadata.num_ctx_tokens
        heads = self.attn.num_heads
        output = forward_args.output.view(q.shape[0], heads, -1)
        latent = self.attn.is_mla_enable
        if contexts > 0 and not only_generation:
            longest = int(metadata.prompt_lens_cpu_runtime[:contexts].max())
            rows = slice(0, context_rows)
            params = self._params(q, k, v, output, metadata, forward_args, rows, 0, contexts, longest)
            self.run_mla_context(params) if latent else self.run_context(params)
        if generations > 0 and kind != AttentionInputType.context_only:
            rows = slice(context_rows, q.shape[0])
            length = (q.shape[0] - context_rows) // generations
            params = self._params(
                q, k, v, output, metadata, forward_args, rows, contexts, generations, length
            )
            self.run_mla_generation(params) if latent else self.run_generation(params)

    def _params(
        self, q: Any, k: Any, v: Any, output: Any, metadata: Any, forward_args: Any, rows: slice, seq_offset: int,
        num_seqs: int, length: int,
    ) -> FmhaParams:  # fmt: skip
        attn, manager = self.attn, metadata.kv_cache_manager
        local = attn.get_local_layer_idx(metadata)
        num_tokens = rows.stop - rows.start
        kv_lens = metadata.kv_lens_runtime[seq_offset : seq_offset + num_seqs]
        shared = {
            "fwd": forward_args, "attn": attn, "meta": metadata, "workspace": metadata.effective_workspace,
            "num_requests": num_seqs, "num_tokens": num_tokens, "seq_offset": seq_offset,
            "input_seq_length": length, "kv_factor": self.kv_factor, "tokens_per_block": metadata.tokens_per_block,
            "total_num_blocks": manager.impl.get_page_index_upper_bound(local, None),
            "max_past_kv_length": int(kv_lens.max()),
            "context_lengths": metadata.prompt_lens_cuda_runtime[seq_offset:],
            "spec_decoding_generation_lengths": metadata.spec_decoding_generation_lengths,
        }  # fmt: skip
        inputs = [output[rows], q[rows], *(None if tensor is None else tensor[rows] for tensor in (k, v))]
        inputs += [
            metadata.kv_lens_cuda_runtime[seq_offset:],
            metadata.spec_decoding_position_offsets_for_cpp,
        ]
        names = (
            ("output", "qkv_or_q", "k", "v", "sequence_length", "spec_decoding_position_offsets_for_cpp")
            if NEW
            else ("context_buf", "qkv_input", "key_input", "value_input", "sequence_lengths",
                  "spec_decoding_position_offsets")
        )  # fmt: skip
        shared |= dict(zip(names, inputs, strict=True))
        if NEW:
            shared |= {
                "layer_idx": attn.layer_idx, "local_layer_idx": local, "num_heads": attn.num_heads,
                "num_kv_heads": attn.num_kv_heads, "head_size": attn.head_dim, "q_scaling": attn.q_scaling,
                "has_fp8_kv_cache": attn.has_fp8_kv_cache, "is_mla_enable": attn.is_mla_enable,
                "use_spec_decoding": metadata.use_spec_decoding, "is_spec_dec_tree": metadata.is_spec_dec_tree,
                "num_seqs": num_seqs, "token_offset": rows.start,
                "kv_cache_block_offsets": metadata.kv_cache_block_offsets,
                "host_kv_cache_pool_pointers": metadata.host_kv_cache_pool_pointers,
                "host_kv_cache_pool_mapping": metadata.host_kv_cache_pool_mapping,
                "rotary_inv_freq": attn.rotary_inv_freq, "rotary_cos_sin": attn.rotary_cos_sin,
                "spec_decoding_packed_mask": metadata.spec_decoding_packed_mask,
            }  # fmt: skip
        else:
            shared["batch_size"] = num_seqs
            shared["attention_input"] = inputs[1]
        return FmhaParams(**shared)

    def run_context(self, params):
        raise NotImplementedError(type(self).__name__)

    def run_generation(self, params):
        raise NotImplementedError(type(self).__name__)

    def run_mla_context(self, params):
        raise NotImplementedError(type(self).__name__)

    def run_mla_generation(self, params):
        raise NotImplementedError(type(self).__name__)
