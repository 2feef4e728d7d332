"""Runs a transformers causal language model over the paged cache.

The model is transformers' own; only its attention call is ours, through the public attention-interface
registry. The rows of a forward are one flat sequence; positions, cache slots and attention come with the
`ForwardBatch`, so the model builds no mask and no cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from trtllm_tree.engine.kv_cache import KVCache, LayerSpec
from trtllm_tree.engine.layer_options import (
    LayerOptions,
    call_problems,
    layer_options,
    option_problems,
    softcap_logits,
)
from trtllm_tree.engine.mla_attention import LatentAttention, latent_layer_spec, latent_problems
from trtllm_tree.engine.ports import ForwardBatch
from trtllm_tree.errors import UnsupportedError

ATTENTION_NAME = "trtllm_tree_paged"
_TARGET = "target"


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_batch: ForwardBatch,
    paged_cache: KVCache,
    paged_options: Sequence[LayerOptions],
    paged_prefix: str = _TARGET,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Write rotated K/V [1, Hkv, T, D] to the cache, attend query [1, Hq, T, D]; returns [1, T, Hq, D].

    The cache knows the module's layer as `paged_prefix` and its index.
    """
    # Rotary channels come in the stream's float32; the cache holds the model's dtype, which is that of V.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    layer_idx: Any = module.layer_idx
    if problems := call_problems(
        layer_idx, paged_options[layer_idx], sliding_window=sliding_window, s_aux=s_aux, others=others
    ):
        raise UnsupportedError(problems)
    name = cache_layer(paged_prefix, layer_idx)
    group = paged_cache.layer(name)[0]
    k_cache, v_cache = paged_cache.write(name, paged_batch.write_slots[group], k, v)
    out = paged_batch.attention.attend(
        q,
        k_cache,
        v_cache,
        paged_batch.page_tables[group],
        scaling,
        sliding_window=sliding_window,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _paged_attention)


def cache_layer(prefix: str, index: int) -> str:
    """The cache's name for the `index`-th of the layers that `prefix` stands for."""
    return f"{prefix}.{index}"


def target_layer(index: int) -> str:
    """The cache's name for the target's `index`-th layer."""
    return cache_layer(_TARGET, index)


def target_layer_specs(config: Any) -> dict[str, LayerSpec]:
    """Cache shapes of a transformers config's attention layers.

    Raises:
        UnsupportedError: layers, or options of scores and logits, that the engine does not compute.
    """
    problems = option_problems(config)
    is_latent = bool(getattr(config, "kv_lora_rank", None))
    if is_latent:
        problems += latent_problems(config)
    if problems:
        raise UnsupportedError(problems)
    heads = config.num_attention_heads
    if is_latent:
        layer = latent_layer_spec(config)
    else:
        layer = LayerSpec(
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )
    return {target_layer(index): layer for index in range(config.num_hidden_layers)}


def load_model_config(model_dir: Path) -> Any:
    """The transformers config of a local model directory."""
    return AutoConfig.from_pretrained(model_dir, local_files_only=True)


def _float32_logits(lm_head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits float32 [M, V] of hidden rows [M, H].

    Logits around 16 are 0.125 apart in bfloat16: rounded, many tokens that the model tells apart would tie, and
    tie differently in a forward of another size. The product accumulates in float32 anyway; it is kept.
    """
    if hidden.dtype == torch.float32 or type(lm_head) is not nn.Linear:
        return lm_head(hidden).float()
    if hidden.is_cuda:
        logits = torch.mm(hidden, lm_head.weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ lm_head.weight.float().t()
    return logits if lm_head.bias is None else logits + lm_head.bias


def _keep_stream_in_float32(decoder: nn.Module, embed_tokens: nn.Module, dtype: torch.dtype) -> None:
    """Carry the residual stream of a 16-bit model in float32; what its products read and give stays 16-bit.

    The stream is where a 16-bit model rounds worst: it is much larger than what a layer adds to it, and it is
    rounded twice a layer. A verify window is rounded differently from the single row of plain decoding, and every
    bit kept here makes it rarer that the two disagree about a near-tie.
    """

    def to_float32(_module: nn.Module, _args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        return out.float()

    def to_dtype(_module: nn.Module, _args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        return out.to(dtype)

    embed_tokens.register_forward_hook(to_float32)
    for module in decoder.modules():
        if "Norm" in type(module).__name__:
            module.register_forward_hook(to_dtype)


def experts_are_capturable(layers: nn.Module, config: Any, dtype: torch.dtype) -> bool:
    """Whether the experts in `layers`, if there are any, never wait for the device.

    torch multiplies groups of experts in bfloat16 by one kernel; in another dtype it reads the group sizes back to the
    host, and so does a loop over experts.
    """
    if not any("Experts" in type(module).__name__ for module in layers.modules()):
        return True
    implementation = getattr(config, "_experts_implementation", None)
    return implementation == "batched_mm" or (implementation == "grouped_mm" and dtype == torch.bfloat16)


class ModelRunner:
    """A target model and its forward.

    Args:
        model_dir: local Hugging Face directory.
        dtype: dtype of weights and activations.
        device: where it runs.
    """

    def __init__(self, model_dir: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self.device, self.dtype = device, dtype
        # transformers' auto classes are typed as nn.Module at best.
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
        )
        self.model = model.to(device).eval().requires_grad_(False)
        self.config = model.config
        self._options = layer_options(self.config)
        self._decoder = model.get_decoder()
        self._last_hidden: torch.Tensor | None = None
        if getattr(self.config, "kv_lora_rank", None):
            for index, layer in enumerate(self._decoder.layers):
                layer.self_attn = LatentAttention(layer.self_attn, target_layer(index))
        if dtype != torch.float32:
            _keep_stream_in_float32(self._decoder, model.get_input_embeddings(), dtype)

    def keep_features(self, layers: Sequence[int], max_rows: int) -> torch.Tensor:
        """Keep the stream that enters each of `layers`, side by side, in the returned [max_rows, F] buffer.

        Every later forward fills its first T rows. The address is fixed: the round compacts rows in place, and a
        captured graph reads them there.
        """
        width = self.config.hidden_size
        buffer = torch.zeros(max_rows, width * len(layers), dtype=self.dtype, device=self.device)
        for index, layer in enumerate(layers):
            columns = buffer[:, index * width : (index + 1) * width]

            def keep(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], columns: torch.Tensor = columns
            ) -> None:
                hidden = args[0] if args else kwargs["hidden_states"]
                columns[: hidden.shape[1]].copy_(hidden[0])

            self._decoder.layers[layer].register_forward_pre_hook(keep, with_kwargs=True)
        return buffer

    def keep_last_hidden(self, max_rows: int) -> torch.Tensor:
        """Keep the rows behind the final norm, which the logits are made of, in the returned [max_rows, H] buffer.

        Filled like that of `keep_features`, whichever rows' logits are wanted.
        """
        assert self._last_hidden is None, "the last hidden rows are kept already"
        shape = (max_rows, self.config.hidden_size)
        self._last_hidden = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self._last_hidden

    @property
    def is_capturable(self) -> bool:
        """Whether a forward on a GPU never waits for the device, so that a CUDA graph can hold it."""
        return experts_are_capturable(self._decoder, self._decoder.config, self.dtype)

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The target's token embedding, which a drafter shares."""
        return self.model.get_input_embeddings()

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Logits float32 [M, V] of the batch's `logit_rows` (all rows when None). Fills the buffers of kept rows."""
        hidden = self._decoder(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            paged_batch=batch,
            paged_cache=cache,
            paged_options=self._options,
        ).last_hidden_state[0]
        if self._last_hidden is not None:
            self._last_hidden[: hidden.shape[0]].copy_(hidden)
        return self.logits(hidden if batch.logit_rows is None else hidden[batch.logit_rows])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 [M, V] of rows [M, H] that a final norm has normed."""
        return softcap_logits(_float32_logits(self.model.lm_head, hidden), self.config)
