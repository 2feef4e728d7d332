"""A hybrid: layers of one mixer each, which attends, holds a recurrent state, or does neither."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import Attention
from .layout import device
from .model_parts import GatedMLP, ModelConfig, RMSNorm, register_auto_model
from .models import SpecDecOneEngineForCausalLM


class Mamba2Mixer(nn.Module):
    """h = a * h of the row before + W x; a node of a tree comes behind its parent. Row by row, as nobody would."""

    def __init__(self, hidden_size: int, layer_idx: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        place = {"dtype": dtype, "device": device()}
        self.in_proj = nn.Linear(hidden_size, hidden_size, bias=False, **place)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False, **place)
        self.decay = nn.Parameter(torch.zeros(hidden_size, **place))

    def forward(
        self, hidden_states: Tensor, attn_metadata: Any, mamba_metadata: Any, spec_metadata: Any = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        cache = attn_metadata.kv_cache_manager.mamba_layer_cache(self.layer_idx)
        slots = mamba_metadata.state_indices[: attn_metadata.num_seqs].tolist()
        inputs = self.in_proj(hidden_states)
        rows = inputs.split(attn_metadata.seq_lens.tolist())
        found, split = [], attn_metadata.num_contexts
        past = attn_metadata.kv_cache_params.num_cached_tokens_per_seq
        verifies = spec_metadata is not None and attn_metadata.kv_cache_manager.is_speculative()
        parents = self._parents(attn_metadata, spec_metadata) if verifies else []
        for row, (inputs, slot) in enumerate(zip(rows, slots, strict=True)):
            starts = row < split and past[row] == 0
            before = torch.zeros_like(inputs[0]) if starts else cache.temporal[slot]
            if row >= split and verifies:
                states = self._states(inputs, before, parents[row - split])
                cache.intermediate_ssm[row - split, : len(inputs)] = states
            else:
                states = self._states(inputs, before, list(range(-1, len(inputs) - 1)))
                cache.temporal[slot] = states[-1]
            found.append(states)
        return self.out_proj(torch.cat(found).tanh())

    def _states(self, inputs: Tensor, before: Tensor, parents: list[int]) -> Tensor:
        states: list[Tensor] = []
        for row, parent in zip(inputs, parents, strict=True):
            states.append(self.decay.sigmoid() * (before if parent < 0 else states[parent]) + row)
        return torch.stack(states)

    def _parents(self, attn_metadata: Any, spec_metadata: Any) -> list[list[int]]:
        """Of the nodes of each generation request: the row before, or what the links of a tree say."""
        size, nodes = attn_metadata.num_generations, spec_metadata.runtime_draft_len + 1
        if not spec_metadata.is_spec_dec_dynamic_tree:
            return [list(range(-1, nodes - 1))] * size
        if attn_metadata.kv_cache_manager.use_replay_state_update:
            raise NotImplementedError("replayed states of a dynamic tree")
        if size == 0:
            return []
        assert (
            spec_metadata.retrieve_next_token is not None and spec_metadata.retrieve_next_sibling is not None
        )
        children, siblings = (
            links[:size].tolist()
            for links in (spec_metadata.retrieve_next_token, spec_metadata.retrieve_next_sibling)
        )
        found = []
        for child, sibling in zip(children, siblings, strict=True):
            parents = [-1] * nodes
            for node in range(nodes):
                if child[node] >= 0:
                    parents[child[node]] = node
                if sibling[node] >= 0:
                    parents[sibling[node]] = parents[node]
            found.append(parents)
        return found


class NemotronHLayer(nn.Module):
    def __init__(self, model_config: ModelConfig, layer_idx: int, kind: str) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.layer_idx, self.kind = layer_idx, kind
        self.norm = RMSNorm(hidden_size=config.hidden_size, eps=config.layer_norm_epsilon, dtype=dtype)
        if kind == "linear_attention":
            self.mixer: nn.Module = Mamba2Mixer(config.hidden_size, layer_idx, dtype)
        elif kind == "full_attention":
            self.mixer = Attention(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                bias=False,
                pos_embd_params=None,
                layer_idx=layer_idx,
                dtype=dtype,
                config=model_config,
                head_dim=config.head_dim,
                rope_fusion=True,
            )
        else:
            self.mixer = GatedMLP(
                hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, dtype=dtype
            )

    def forward(
        self, position_ids: Tensor, hidden_states: Tensor, attn_metadata: Any, residual: Tensor,
        spec_metadata: Any = None, mamba_metadata: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        normed, residual = self.norm(hidden_states, residual)
        if self.kind == "linear_attention":
            mixed = self.mixer(normed, attn_metadata, mamba_metadata, spec_metadata=spec_metadata)
        elif self.kind == "full_attention":
            mixed = self.mixer(position_ids=position_ids, hidden_states=normed, attn_metadata=attn_metadata)
        else:
            mixed = self.mixer(normed)
        if spec_metadata is not None:
            spec_metadata.maybe_capture_hidden_states(self.layer_idx, mixed, residual)
        return mixed, residual


class NemotronHModel(nn.Module):
    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device())
        self.layers = nn.ModuleList(
            NemotronHLayer(model_config, i, kind) for i, kind in enumerate(config.layers_block_type)
        )
        self.norm_f = RMSNorm(hidden_size=config.hidden_size, eps=config.layer_norm_epsilon, dtype=dtype)

    def forward(
        self, attn_metadata: Any, input_ids: Tensor | None = None, position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, spec_metadata: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(
                position_ids, hidden, attn_metadata, residual, spec_metadata=spec_metadata,
                mamba_metadata=attn_metadata.mamba_metadata,
            )  # fmt: skip
        return self.norm_f(hidden, residual)[0]


@register_auto_model("NemotronHForCausalLM")
class NemotronHForCausalLM(SpecDecOneEngineForCausalLM):
    """Attention without RoPE, recurrent layers, and MLPs."""

    def __init__(self, model_config):
        super().__init__(NemotronHModel(model_config), model_config)
