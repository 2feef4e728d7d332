"""The options of one attention call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

import torch


class AttentionInputType(IntEnum):
    mixed = 0
    context_only = 1
    generation_only = 2


class PredefinedAttentionMask(str, Enum):
    CAUSAL = "causal"
    FULL = "full"


@dataclass(kw_only=True, slots=True)
class AttentionForwardArgs:
    """Options of one attention call."""

    output: torch.Tensor | None = None
    output_sf: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    kv_scale_orig_quant: torch.Tensor | None = None
    kv_scale_quant_orig: torch.Tensor | None = None
    attention_mask: PredefinedAttentionMask = PredefinedAttentionMask.CAUSAL
    attention_input_type: AttentionInputType = AttentionInputType.mixed
    attention_window_size: int | None = None
    attention_mask_data: torch.Tensor | None = None
    attention_sinks: torch.Tensor | None = None
    latent_cache: torch.Tensor | None = None
    q_pe: torch.Tensor | None = None
    quant_q_buffer: torch.Tensor | None = None
    is_fused_qkv: bool = True
    update_kv_cache: bool = True
