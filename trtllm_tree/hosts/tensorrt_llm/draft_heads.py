"""What drafts on this host: TensorRT-LLM's modules of an EAGLE3 head, or of the target's own MTP layer.

A head says what it reads of the target, and runs rows that were described to attention before. Must not know where
the rows lie, what they see, nor how trees grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from trtllm_tree.hosts.tensorrt_llm.probe import ProbeReport


class DraftHead(Protocol):
    """A drafter's modules. To be made when its weights are loaded.

    Attributes:
        module: TensorRT-LLM's draft model.
        hidden_size: H.
        dtype: of hidden rows.
        d2t: int64 [Vd], offsets from draft to target ids; None where they are the same.
        draft_vocab_size: Vd.
    """

    module: Any
    hidden_size: int
    dtype: torch.dtype
    d2t: torch.Tensor | None
    draft_vocab_size: int

    def feature_shape(self, spec_metadata: Any) -> tuple[int, torch.dtype]:
        """F and the dtype of `features`, known before the target runs."""
        ...

    def features(self, hidden_states: torch.Tensor, spec_metadata: Any) -> torch.Tensor:
        """What the target left, [T or more, F]; `hidden_states` [T, H] are its last rows, behind its final norm."""
        ...

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[T, F] to hidden rows [T, H]."""
        ...

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        metadata: Any,
        spec_metadata: Any,
    ) -> torch.Tensor:
        """int32 [T] tokens and positions, which may be changed, and [T, H] to what is handed on, [T, H]."""
        ...

    def logits(self, rows: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Rows [M, H] that were handed on to scores [M, Vd]."""
        ...


class Eagle3DraftHead:
    """The head of a one-model EAGLE3 worker.

    Args:
        module: TensorRT-LLM's `Eagle3ForCausalLM`, or what has its parts: `model`, `lm_head`, `logits_processor` and
            `apply_eagle3_fc`.
    """

    def __init__(self, module: Any) -> None:
        inner, config = module.model, module.config
        self.module = module
        self.hidden_size, self.dtype = int(inner.hidden_size), inner.dtype
        d2t = getattr(inner, "d2t", None)
        # TensorRT-LLM keeps offsets too, in 32 bits.
        self.d2t = None if d2t is None else d2t.detach().long().contiguous()
        self.draft_vocab_size = int(getattr(config, "draft_vocab_size", None) or config.vocab_size)
        # Some heads hand on rows that are normed already.
        self._hands_on_normed = False

    def feature_shape(self, spec_metadata: Any) -> tuple[int, torch.dtype]:
        """See `DraftHead.feature_shape`."""
        size = spec_metadata.hidden_size * len(spec_metadata.layers_to_capture)
        return size, spec_metadata.hidden_states.dtype

    def features(self, hidden_states: torch.Tensor, spec_metadata: Any) -> torch.Tensor:
        """What was captured of the target's layers."""
        return spec_metadata.hidden_states[:, : self.feature_shape(spec_metadata)[0]]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.fuse`."""
        return self.module.apply_eagle3_fc(features)

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        metadata: Any,
        spec_metadata: Any,
    ) -> torch.Tensor:
        """See `DraftHead.run`."""
        normed, handed_on = self.module.model(
            input_ids=token_ids,
            position_ids=positions,
            hidden_states=hidden,
            attn_metadata=metadata,
            spec_metadata=spec_metadata,
        )
        self._hands_on_normed = handed_on is normed
        return handed_on

    def logits(self, rows: torch.Tensor, metadata: Any) -> torch.Tensor:
        """See `DraftHead.logits`."""
        rows = rows if self._hands_on_normed else self.module.model.norm(rows)
        return self.module.logits_processor(rows, self.module.lm_head, metadata, True)


class MtpDraftHead:
    """The target's one MTP layer, run again for every step; it hands on rows behind its own norm.

    Args:
        module: TensorRT-LLM's `MTPForCausalLM`: `mtp_layers`, and the target's own `lm_head` and `embed_tokens`.
        model_config: TensorRT-LLM's ModelConfig of the target.
        allgather: TensorRT-LLM's.
    """

    def __init__(self, module: Any, model_config: Any, allgather: Callable[..., torch.Tensor]) -> None:
        self.module, self._allgather, self._mapping = module, allgather, model_config.mapping
        self.hidden_size = int(model_config.pretrained_config.hidden_size)
        self.dtype = model_config.torch_dtype
        self.d2t: torch.Tensor | None = None
        self.draft_vocab_size = int(module.lm_head.num_embeddings)

    def feature_shape(self, spec_metadata: Any) -> tuple[int, torch.dtype]:
        """See `DraftHead.feature_shape`."""
        return self.hidden_size, self.dtype

    def features(self, hidden_states: torch.Tensor, spec_metadata: Any) -> torch.Tensor:
        """The target's last hidden rows."""
        return hidden_states

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The layer reads them as it reads its own."""
        return features

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        metadata: Any,
        spec_metadata: Any,
    ) -> torch.Tensor:
        """See `DraftHead.run`. Rows of other ranks are not counted: there is no attention data parallelism."""
        return self.module.mtp_layers[0](
            input_ids=token_ids,
            position_ids=positions,
            hidden_states=hidden,
            embed_tokens=self.module.embed_tokens,
            attn_metadata=metadata,
        )

    def logits(self, rows: torch.Tensor, metadata: Any) -> torch.Tensor:
        """See `DraftHead.logits`. The layer's scorer leaves the vocabulary sharded over tensor-parallel ranks."""
        scores = self.module.mtp_layers[0].shared_head(
            rows, lm_head=self.module.lm_head, attn_metadata=metadata, return_context_logits=True
        )
        if scores.shape[-1] < self.draft_vocab_size:
            scores = self._allgather(scores, self._mapping, dim=-1)
        # Behind the vocabulary there may be rows that only make the shards equal.
        return scores[..., : self.draft_vocab_size]


def draft_head(draft_model: Any, model_config: Any, report: ProbeReport) -> DraftHead:
    """The head over a target's `draft_model`.

    Args:
        model_config: the target's.
        report: the probe's, with the feature `mtp` where MTP layers draft.
    """
    if model_config.spec_config.decoding_type == "MTP":
        return MtpDraftHead(draft_model, model_config, report.resolved["mtp", "allgather"].value)
    return Eagle3DraftHead(draft_model)
