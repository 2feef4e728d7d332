"""One-model workers: the base class, and the worker that verifies and drafts chains."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .layout import NEW
from .mamba import MambaCacheManager
from .metadata import TrtllmAttentionMetadata
from .resources import ResourceManagerType


class _SharedWorker(nn.Module):
    """What both layouts' base classes have."""

    def __init__(self, use_separate_draft_kv_cache=False):
        super().__init__()
        self.guided_decoder: Any = None
        self.use_separate_draft_kv_cache = use_separate_draft_kv_cache
        self._d2t: torch.Tensor | None = None

    def set_guided_decoder(self, guided_decoder: Any) -> bool:
        self.guided_decoder = guided_decoder
        return True

    def _prepare_next_new_tokens(
        self, accepted_tokens, next_draft_tokens, batch_indices_cuda, batch_size, num_accepted_tokens
    ):
        last = accepted_tokens[batch_indices_cuda[:batch_size].long(), num_accepted_tokens.long() - 1]
        return torch.cat((last[:, None], next_draft_tokens), dim=1)

    def _prepare_context_input_ids(
        self, input_ids, num_ctx_tokens, gather_ids, accepted_tokens, num_contexts
    ):
        shifted = input_ids[:num_ctx_tokens].to(torch.int32).roll(-1)
        shifted[gather_ids[:num_contexts].long()] = accepted_tokens[:num_contexts, 0]
        return shifted

    def get_draft_kv_cache_manager(self, resource_manager):
        if not self.use_separate_draft_kv_cache or resource_manager is None:
            return None
        return resource_manager.get_resource_manager(ResourceManagerType.DRAFT_KV_CACHE_MANAGER)

    @contextmanager
    def draft_kv_cache_context(self, attn_metadata, draft_kv_cache_manager):
        names = ("kv_cache_manager", "kv_cache_block_offsets", "host_kv_cache_block_offsets")
        saved = {name: getattr(attn_metadata, name) for name in names}
        if draft_kv_cache_manager is not None and isinstance(attn_metadata, TrtllmAttentionMetadata):
            attn_metadata.kv_cache_manager = draft_kv_cache_manager
            attn_metadata.kv_cache_block_offsets = attn_metadata.draft_kv_cache_block_offsets
            attn_metadata.host_kv_cache_block_offsets = draft_kv_cache_manager.host_kv_cache_block_offsets
        try:
            yield
        finally:
            for name, value in saved.items():
                setattr(attn_metadata, name, value)

    def _prepare_attn_metadata_for_spec_dec(self, attn_metadata):
        attn_metadata.prepare_for_spec_dec("_seq_lens", "_seq_lens_cuda")

    def _restore_attn_metadata_from_spec_dec(self, attn_metadata):
        attn_metadata.restore_from_spec_dec()
        attn_metadata.on_update()


if NEW:

    class SpecWorkerBase(_SharedWorker):
        """Subclasses implement `_forward_impl`; `forward` is not theirs."""

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            if "forward" in cls.__dict__:
                raise TypeError(f"{cls.__name__} must implement _forward_impl and leave forward alone")

        def set_draft_model(self, draft_model: Any) -> None:
            self._d2t = getattr(getattr(draft_model, "model", None), "d2t", None)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            attn_metadata = kwargs.get("attn_metadata")
            try:
                return self._forward_impl(*args, **kwargs)
            finally:
                if attn_metadata is not None and attn_metadata.has_spec_dec_saved_state:
                    self._restore_attn_metadata_from_spec_dec(attn_metadata)

        def _forward_impl(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

else:

    class SpecWorkerBase(_SharedWorker):  # type: ignore[no-redef]
        """Subclasses implement `forward`."""


class _ChainWorker(SpecWorkerBase):
    """Greedy verification of a chain, and a chain of drafts."""

    def __init__(self, spec_config, mapping=None, model_config=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping, self.model_config = spec_config, mapping, model_config
        self.is_mtp_eagle = spec_config.spec_dec_mode.is_mtp_eagle_one_model()

    @property
    def max_draft_len(self) -> int:
        return self.spec_config.max_draft_len

    def sample_and_accept_draft_tokens(
        self, input_ids: Any, logits: torch.Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        contexts, size, drafts = (
            attn_metadata.num_contexts,
            attn_metadata.num_seqs,
            spec_metadata.runtime_draft_len,
        )
        target = logits.argmax(dim=-1).int()
        accepted = target.new_zeros(size, drafts + 1)
        accepted[:contexts, 0] = target[:contexts]
        accepted[contexts:] = target[contexts:].view(-1, drafts + 1)
        counts = torch.ones_like(accepted[:, 0])
        agree = spec_metadata.draft_tokens.view(-1, drafts) == accepted[contexts:, :drafts]
        counts[contexts:] += agree.int().cumprod(dim=-1).sum(dim=1).int()
        return accepted, counts

    def _round(
        self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model,
        resource_manager=None,
    ):  # fmt: skip
        accepted, counts = self.sample_and_accept_draft_tokens(
            input_ids, logits, attn_metadata, spec_metadata
        )
        contexts, size, drafts = (
            attn_metadata.num_contexts,
            attn_metadata.num_seqs,
            spec_metadata.runtime_draft_len,
        )
        manager = attn_metadata.kv_cache_manager
        if isinstance(manager, MambaCacheManager) and size > contexts:
            manager.update_mamba_states(
                attn_metadata=attn_metadata, num_accepted_tokens=counts,
                state_indices=attn_metadata.mamba_metadata.state_indices,
            )  # fmt: skip
        self._prepare_attn_metadata_for_spec_dec(attn_metadata)
        last = attn_metadata.seq_lens_cuda.cumsum(0).long() - 1
        features = draft_model.apply_eagle3_fc(spec_metadata.hidden_states[: input_ids.shape[0]])
        shifted = self._prepare_context_input_ids(
            input_ids, attn_metadata.num_ctx_tokens, last, accepted, contexts
        )
        gather = last.clone()
        gather[contexts:] += counts[contexts:].long() - (drafts + 1)
        inputs = {
            "input_ids": torch.cat((shifted, accepted[contexts:].reshape(-1))),
            "position_ids": position_ids.squeeze(0),
            "hidden_states": features,
        }
        found = []
        kv_lens = attn_metadata.kv_lens_cuda[:size].clone()
        with self.draft_kv_cache_context(attn_metadata, self.get_draft_kv_cache_manager(resource_manager)):
            for step in range(drafts):
                hidden, to_save = draft_model.model(
                    **inputs,
                    attn_metadata=attn_metadata,
                    spec_metadata=spec_metadata,
                    all_rank_num_tokens=None,
                )
                attn_metadata.use_spec_decoding = False
                draft_logits = draft_model.logits_processor(
                    hidden[gather], draft_model.lm_head, attn_metadata, True
                )
                token = draft_logits.argmax(dim=-1)
                d2t = getattr(draft_model.model, "d2t", None)
                found.append((token if d2t is None else token + d2t[token]).int())
                inputs = {
                    "input_ids": found[-1],
                    "position_ids": inputs["position_ids"][gather] + 1,
                    "hidden_states": to_save[gather],
                }
                if step == 0:
                    attn_metadata._seq_lens[:size].fill_(1)
                    attn_metadata._seq_lens_cuda[:size].fill_(1)
                    attn_metadata.num_contexts = 0
                    attn_metadata.kv_lens_cuda[contexts:size] -= drafts - counts[contexts:]
                    attn_metadata.kv_lens_cuda[:contexts] += 1
                else:
                    attn_metadata.kv_lens_cuda[:size] += 1
                attn_metadata.update_for_spec_dec()
                gather = spec_metadata.batch_indices_cuda[:size].long()
        next_drafts = torch.stack(found, dim=1)
        self._restore_attn_metadata_from_spec_dec(attn_metadata)
        # The real one leaves these to the next step's prepare; a captured graph must find them as they were.
        attn_metadata.kv_lens_cuda[:size].copy_(kv_lens)
        attn_metadata.num_contexts = contexts
        attn_metadata.use_spec_decoding = True
        next_new = self._prepare_next_new_tokens(
            accepted, next_drafts, spec_metadata.batch_indices_cuda, size, counts
        )
        return {
            "logits": logits, "new_tokens": accepted, "new_tokens_lens": counts,
            "next_draft_tokens": next_drafts, "next_new_tokens": next_new,
        }  # fmt: skip


if NEW:

    class Eagle3OneModelWorker(_ChainWorker):
        """Chains, by `_forward_impl`."""

        def _forward_impl(
            self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model,
            resource_manager=None,
        ):  # fmt: skip
            return self._round(
                input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model,
                resource_manager,
            )  # fmt: skip

else:

    class Eagle3OneModelWorker(_ChainWorker):  # type: ignore[no-redef]
        """Chains, by `forward`."""

        def forward(
            self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model,
            resource_manager=None,
        ):  # fmt: skip
            return self._round(
                input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model,
                resource_manager,
            )  # fmt: skip


class Eagle3OneModelDynamicTreeWorker(Eagle3OneModelWorker):
    """TensorRT-LLM's own trees are not imitated: whoever sees this was not given the plugin's worker."""

    def sample_and_accept_draft_tokens(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the built-in dynamic tree worker ran")


def get_spec_worker(
    spec_config: Any, model_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False
) -> Any:
    """The built-in choice."""
    is_tree = getattr(spec_config, "use_dynamic_tree", False) and (spec_config.dynamic_tree_max_topK or 0) > 1
    if spec_config.spec_dec_mode.is_mtp_eagle_one_model():
        from .mtp_worker import MTPEagleDynamicTreeWorker, MTPEagleWorker

        mtp_worker = MTPEagleDynamicTreeWorker if is_tree else MTPEagleWorker
        return mtp_worker(spec_config, model_config, use_separate_draft_kv_cache)
    worker = Eagle3OneModelDynamicTreeWorker if is_tree else Eagle3OneModelWorker
    return worker(spec_config, mapping, model_config, use_separate_draft_kv_cache)
