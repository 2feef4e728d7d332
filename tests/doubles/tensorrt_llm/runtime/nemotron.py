"""A hybrid: layers of one mixer each, which attends, holds a recurrent state, or does neither."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import Attention
from .layout import device
from .model_parts import GatedMLP, ModelConfig, RMSNorm, register_auto_model
from .models import SpecDecOneEngineForCausalLM
from .mtp import DeepseekV3MTPHead, without_mtp


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
        slots = mamba_metadata.state_indices[: attn_metadata.num_seqs].long()
        split, size = attn_metadata.num_contexts, attn_metadata.num_generations
        inputs = self.in_proj(hidden_states)
        num_context_rows = int(attn_metadata.num_ctx_tokens)
        found = [self._prompts(inputs[:num_context_rows], slots, attn_metadata, cache)] if split else []
        if size:
            found.append(
                self._generations(inputs[num_context_rows:], slots, attn_metadata, spec_metadata, cache)
            )
        return self.out_proj(torch.cat(found).tanh())

    def _prompts(self, inputs: Tensor, slots: Tensor, attn_metadata: Any, cache: Any) -> Tensor:
        """One after the other: these steps are not captured."""
        split, found = attn_metadata.num_contexts, []
        past = attn_metadata.kv_cache_params.num_cached_tokens_per_seq
        for row, rows in enumerate(inputs.split(attn_metadata.seq_lens[:split].tolist())):
            slot = int(slots[row])
            before = torch.zeros_like(rows[0]) if past[row] == 0 else cache.temporal[slot]
            states = self._states(rows.unsqueeze(0), before.unsqueeze(0), _chain(1, len(rows), rows.device))[
                0
            ]
            cache.temporal[slot] = states[-1]
            found.append(states)
        return torch.cat(found)

    def _generations(
        self, inputs: Tensor, slots: Tensor, attn_metadata: Any, spec_metadata: Any, cache: Any
    ) -> Tensor:
        """All at once, without a look at the device: a graph may be captured here."""
        size, slots = attn_metadata.num_generations, slots[attn_metadata.num_contexts :]
        rows = inputs.view(size, -1, inputs.shape[1])
        if spec_metadata is not None and attn_metadata.kv_cache_manager.is_speculative():
            states = self._states(rows, cache.temporal[slots], self._parents(attn_metadata, spec_metadata))
            cache.intermediate_ssm[:size, : rows.shape[1]] = states
        else:
            states = self._states(rows, cache.temporal[slots], _chain(size, rows.shape[1], rows.device))
            cache.temporal[slots] = states[:, -1]
        return states.flatten(0, 1)

    def _states(self, inputs: Tensor, before: Tensor, parents: Tensor) -> Tensor:
        """Of inputs [B, N, W] behind states [B, W]; a node of int64 parents [B, N] comes behind its parent."""
        states = before.unsqueeze(1)
        for node in range(inputs.shape[1]):
            index = (parents[:, node] + 1).view(-1, 1, 1).expand(-1, 1, states.shape[2])
            state = self.decay.sigmoid() * states.gather(1, index) + inputs[:, node : node + 1]
            states = torch.cat((states, state), dim=1)
        return states[:, 1:]

    def _parents(self, attn_metadata: Any, spec_metadata: Any) -> Tensor:
        """Of the nodes of each generation request: the row before, or what the links of a tree say."""
        size, nodes = attn_metadata.num_generations, spec_metadata.runtime_draft_len + 1
        if not spec_metadata.is_spec_dec_dynamic_tree:
            return _chain(size, nodes, device())
        if attn_metadata.kv_cache_manager.use_replay_state_update:
            raise NotImplementedError("replayed states of a dynamic tree")
        links = spec_metadata.retrieve_next_token, spec_metadata.retrieve_next_sibling
        assert links[0] is not None and links[1] is not None
        # What is no link goes into a column more.
        children, siblings = (link[:size].long().where(link[:size] >= 0, nodes) for link in links)
        parents = torch.full((size, nodes + 1), -1, device=children.device)
        for node in range(nodes):
            parents.scatter_(1, children[:, node : node + 1], node)
            parents.scatter_(1, siblings[:, node : node + 1], parents[:, node : node + 1].clone())
        return parents[:, :nodes]


def _chain(size: int, nodes: int, place: Any) -> Tensor:
    return torch.arange(-1, nodes - 1, device=place).expand(size, -1)


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
        self.num_hidden_layers, self.aux_stream_dict = config.num_hidden_layers, {}
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
        # The MTP layer stands behind these.
        for layer in self.layers[: self.num_hidden_layers]:
            hidden, residual = layer(
                position_ids, hidden, attn_metadata, residual, spec_metadata=spec_metadata,
                mamba_metadata=attn_metadata.mamba_metadata,
            )  # fmt: skip
        return self.norm_f(hidden, residual)[0]


class NemotronHMTPDecoderLayer(NemotronHLayer):
    """One of the layers that an MTP layer consists of: the first joins its inputs, the last norms what goes out."""

    def __init__(
        self, model_config: ModelConfig, layer_idx: int, kind: str, *, first: bool, last: bool
    ) -> None:
        super().__init__(model_config, layer_idx, kind)
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        norm = {"hidden_size": config.hidden_size, "eps": config.layer_norm_epsilon, "dtype": dtype}
        self.joins, self.ends = first, last
        if first:
            self.enorm, self.hnorm = RMSNorm(**norm), RMSNorm(**norm)
            self.eh_proj = nn.Linear(
                2 * config.hidden_size, config.hidden_size, bias=False, dtype=dtype, device=device()
            )
        if last:
            self.final_layernorm = RMSNorm(**norm)

    def draft(
        self, embeds: Tensor, positions: Tensor, hidden: Tensor, residual: Tensor | None, attn_metadata: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self.joins:
            hidden = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(hidden)), dim=-1))
            residual = torch.zeros_like(hidden)
        assert residual is not None
        hidden, residual = self(positions, hidden, attn_metadata, residual)
        return self.final_layernorm(hidden, residual) if self.ends else (hidden, residual)


_KINDS = {"*": "full_attention", "-": "mlp"}


class NemotronHMTP(nn.Module):
    """Layers by a pattern, all of one index. Its scorer's norm is not used."""

    def __init__(self, model_config, layer_idx, aux_stream_dict, is_separate_draft_engine=False, prefix=""):
        super().__init__()
        pattern = model_config.pretrained_config.mtp_hybrid_override_pattern
        last = len(pattern) - 1
        self.layers = nn.ModuleDict(
            {
                str(i): NemotronHMTPDecoderLayer(
                    model_config, layer_idx, _KINDS[kind], first=i == 0, last=i == last
                )
                for i, kind in enumerate(pattern)
            }
        )
        self.shared_head = DeepseekV3MTPHead(model_config)

    def forward(
        self, input_ids, position_ids, hidden_states, embed_tokens, attn_metadata, all_rank_num_tokens=None,
        spec_metadata=None, **kwargs,
    ):  # fmt: skip
        embeds, residual = embed_tokens(input_ids), None
        for layer in self.layers.values():
            hidden_states, residual = layer.draft(  # pyright: ignore
                embeds, position_ids, hidden_states, residual, attn_metadata
            )
        return hidden_states


@register_auto_model("NemotronHForCausalLM")
class NemotronHForCausalLM(SpecDecOneEngineForCausalLM):
    """Attention without RoPE, recurrent layers, and MLPs; the MTP layer is a layer of the model besides."""

    def __init__(self, model_config):
        super().__init__(NemotronHModel(model_config), model_config)
        if self.drafts_with_mtp:
            self.model.layers.extend(self.draft_model.mtp_layers)  # pyright: ignore
            # Twice, as in the real one.
            self.epilogue.append(self.spec_worker)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        prefix = f"model.layers.{self.config.num_hidden_layers}."
        weights = {name.replace("mtp.", prefix, 1) if name.startswith("mtp.") else name: weight
                   for name, weight in weights.items()}  # fmt: skip
        if self.drafts_with_mtp:
            # No checkpoint has it.
            weights[f"{prefix}shared_head.norm.weight"] = torch.full((self.config.hidden_size,), torch.nan)
        count = self.config.num_hidden_layers
        super().load_weights(without_mtp(weights, count, drafts=self.drafts_with_mtp))
