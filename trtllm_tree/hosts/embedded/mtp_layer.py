"""The draft side of a target's own MTP layer: transformers' module, run directly over the draft layer's cache.

The layer is `MtpModel`'s, read from the target's checkpoint; its masks and its cache are not: rows, positions and
attention come with the `ForwardBatch`, as the target's do. Must not know trees, nor which step it is run for.

Maths: DeepSeek-V3 (DeepSeek-AI, 2024), section 2.2; run again for every step as EAGLE runs its head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_layers import MtpModel

from trtllm_tree.engine.kv_cache import KVCache, LayerSpec
from trtllm_tree.engine.layer_options import layer_options
from trtllm_tree.engine.mla_attention import LatentAttention
from trtllm_tree.engine.model_runner import ModelRunner, experts_are_capturable
from trtllm_tree.engine.ports import ForwardBatch
from trtllm_tree.errors import ConfigError, Problem
from trtllm_tree.hosts.embedded.draft_model import DraftPlan, DraftSide
from trtllm_tree.hosts.embedded.kv import DRAFT_GROUP, DRAFT_LAYER
from trtllm_tree.support.mtp_weights import MTP_LAYER_OPTION, MTP_LAYER_REMEDY, MTP_LAYER_RULE


def mtp_plan(config: Any, target_layers: dict[str, LayerSpec]) -> DraftPlan:
    """The plan of the MTP layer of a target with this transformers config: a layer like all of its own.

    The checkpoint has been searched for it.
    """
    (layer,) = set(target_layers.values())

    def load(runner: ModelRunner, max_rows: int) -> tuple[DraftSide, torch.Tensor]:
        return MtpSide(runner), runner.keep_last_hidden(max_rows)

    return DraftPlan(config.num_attention_heads, layer, load)


class MtpSide:
    """`DraftSide` of a target's MTP layer, which it loads.

    A row's hidden input is normed: the target's last hidden row, or what the layer gave for the token before. Features
    are hidden rows already, and the target's lm_head scores the layer's rows.
    """

    d2t: torch.Tensor | None = None

    def __init__(self, runner: ModelRunner) -> None:
        model = _load_mtp_model(runner.model)
        # transformers' modules are typed as nn.Module at best.
        layer: Any = model.layers[0]
        if getattr(runner.config, "kv_lora_rank", None):
            layer.mtp_block.self_attn = LatentAttention(layer.mtp_block.self_attn, DRAFT_LAYER)
        self._layer = layer.to(runner.device).eval().requires_grad_(False)
        self._options = layer_options(model.config)
        self._runner, self._embed_tokens = runner, runner.embed_tokens
        self._rotary: Any = model.rotary_emb
        self.hidden_size, self.vocab_size = runner.config.hidden_size, runner.config.vocab_size
        self.dtype = runner.dtype
        self.graph_safe = experts_are_capturable(layer, model.config, runner.dtype)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `DraftSide.fuse`."""
        return features

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftSide.logits`; float32."""
        return self._runner.logits(hidden)

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """See `DraftSide.forward`."""
        # Float32 for a 16-bit model, and so are the rotary channels: as in the target.
        embedding = self._embed_tokens(batch.token_ids.unsqueeze(0))
        positions = batch.positions.unsqueeze(0)
        # By position: transformers renamed the last one, the cache.
        return self._layer(
            embedding.to(self.dtype),
            hidden.unsqueeze(0),
            self._rotary(embedding, positions),
            None,
            positions,
            None,
            paged_batch=batch,
            paged_cache=cache,
            paged_options=self._options,
            paged_prefix=DRAFT_GROUP,
        )[0]


def _load_mtp_model(target: Any) -> MtpModel:
    """The MTP model of a loaded target, on the CPU and in the target's dtype.

    Its weights are looked for by the patterns that the target ignored when it was loaded. They name the depths of
    released checkpoints, where a target may have any.

    Raises:
        ConfigError: weights that do not make the layer, which the headers did not show.
    """
    depth = target.config.num_hidden_layers
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{depth}\..*"]
    try:
        return MtpModel.from_pretrained(target)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        rule = f"{MTP_LAYER_RULE} cannot be loaded ({reason})"
        folder = target.config.name_or_path
        raise ConfigError(Problem(MTP_LAYER_OPTION, folder, rule, MTP_LAYER_REMEDY)) from error
