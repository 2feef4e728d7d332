"""The loop that drives a model as TensorRT-LLM's does: schedule, reserve, step, sample, rewind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from .engine import ModelEngine
from .kv_cache import FP8, KVCacheManager, KVCacheManagerV2
from .mamba import MambaHybridCacheManager, MambaHybridCacheManagerV2
from .model_parts import ModelConfig, model_class
from .models import torch_dtype_of
from .requests import LlmRequest, LlmRequestState, SamplingConfig, ScheduledRequests
from .resources import ResourceManager, ResourceManagerType
from .sampler import SampleState, SpecSampler
from .spec_metadata import Eagle3OneModelSpecMetadata
from .spec_tree import Eagle3OneModelDynamicTreeResourceManager, MTPEagleDynamicTreeResourceManager

DUMMY_ID = 1 << 32


class Executor:
    """Loads a target (and its head) and generates.

    Args:
        kv_cache_dtype: "auto" for the model's, or "fp8".
        kv_manager: "v1" or "v2".
        stale_offsets: see `KVCacheManager`.
        max_chunk: prompt tokens of one request in one step; None for all of them.
        overlap: launch a step before the host knows what the last one accepted.
        graph_batch_sizes: decode batches that `warmup` prepares (captures on CUDA); smaller ones are padded to them.
        rope_fusion: whether the target's layers let the attention library rotate.
        replay: whether recurrent states are replayed; of a hybrid.
        model_options: further fields of `ModelConfig`.
    """

    def __init__(
        self, model_dir: str | Path, *, speculative_config: Any = None, dtype: torch.dtype | None = None,
        kv_cache_dtype: str = "auto", kv_manager: str = "v1", max_batch_size: int = 4, max_num_tokens: int = 1024,
        max_seq_len: int = 256, tokens_per_block: int = 16, num_blocks: int | None = None, overlap: bool = False,
        stale_offsets: bool = False, max_chunk: int | None = None, graph_batch_sizes: Sequence[int] = (),
        rope_fusion: bool = True, replay: bool = False,
        **model_options: Any,
    ) -> None:  # fmt: skip
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        dtype = dtype or torch_dtype_of(config)
        self.spec_config, self.max_batch_size, self.overlap = speculative_config, max_batch_size, overlap
        self.max_chunk = max_chunk
        self.graph_batch_sizes, self._replay = sorted(graph_batch_sizes), replay
        if speculative_config is not None:
            speculative_config._max_batch_size = max_batch_size
        self.model_config = ModelConfig(
            config, spec_config=speculative_config, max_num_tokens=max_num_tokens, max_seq_len=max_seq_len,
            torch_dtype=dtype, kv_cache_dtype=FP8 if kv_cache_dtype == "fp8" else dtype, rope_fusion=rope_fusion,
            **model_options,
        )  # fmt: skip
        if kv_cache_dtype == "fp8":
            self.model_config.quant_config.kv_cache_quant_algo = "FP8"
        self.model = model_class(config.architectures[0])(self.model_config)
        self._load(Path(model_dir))
        limits = {
            "stale_offsets": stale_offsets,
            "tokens_per_block": tokens_per_block,
            "max_seq_len": max_seq_len,
            "max_batch_size": max_batch_size,
        }
        self._make_managers(kv_manager, num_blocks, limits)
        one_model = self.model.spec_worker is not None
        self.sampler = SpecSampler(
            max_draft_len=speculative_config.max_draft_len if one_model else 0,
            max_total_draft_tokens=speculative_config.tokens_per_gen_step - 1 if one_model else 0,
            num_slots=max_batch_size, max_seq_len=max_seq_len,
        )  # fmt: skip
        self.engine = ModelEngine(
            self.model, self.resource_manager, self.sampler, kv_cache_manager=self.kv_cache_manager,
            draft_kv_cache_manager=self.draft_kv_cache_manager, spec_config=speculative_config if one_model else None,
            spec_metadata=self._spec_metadata(max_num_tokens, dtype) if one_model else None,
            spec_tree_manager=None if self.tree_resources is None else self.tree_resources.spec_tree_manager,
            max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, overlap=overlap,
        )  # fmt: skip
        self._free_slots = list(range(max_batch_size))[::-1]
        self._waiting: list[LlmRequest] = []
        self._active: list[LlmRequest] = []
        self._in_flight: tuple[ScheduledRequests, SampleState] | None = None
        self._next_id = 0

    def _load(self, model_dir: Path) -> None:
        weights: dict[str, torch.Tensor] = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            weights |= load_file(path)
        self.model.load_weights(weights)
        if self.model.draft_model is not None and not self.model.drafts_with_mtp:
            head = Path(self.spec_config.speculative_model)
            self.model.load_draft_weights(load_file(head / "model.safetensors"))
        self.model.eval()

    def _make_managers(self, kind: str, num_blocks: int | None, limits: dict[str, int]) -> None:
        manager = {"v1": KVCacheManager, "v2": KVCacheManagerV2}[kind]
        options: dict[str, Any] = {"dtype": self.model_config.kv_cache_dtype, "spec_config": self.spec_config}
        options |= limits
        config = self.model_config.pretrained_config
        count = config.num_hidden_layers
        latent = getattr(config, "kv_lora_rank", None)
        heads, dims = [config.num_key_value_heads] * count, [_head_dim(config)] * count
        if latent is not None:
            heads, dims = [1] * count, [latent + config.qk_rope_head_dim] * count
        self.draft_kv_cache_manager = None
        draft = self.model.draft_model
        if draft is not None:
            # An MTP layer is of its model's kind.
            draft_config = getattr(draft, "config", config)
            shape = (draft_config.num_key_value_heads, _head_dim(draft_config))
            if self.model.use_separate_draft_kv_cache:
                self.draft_kv_cache_manager = manager(
                    num_layers=1,
                    num_kv_heads=shape[0],
                    head_dim=shape[1],
                    num_blocks=num_blocks,
                    layer_ids=[count],
                    is_draft=True,
                    **options,
                )
            else:
                assert latent is None, (
                    "a head with keys and values needs a cache of its own beside latent rows"
                )
                heads, dims = [*heads, shape[0]], [*dims, shape[1]]
        kinds = getattr(config, "layers_block_type", None) or []
        recurrent = [layer for layer, layer_kind in enumerate(kinds) if layer_kind == "linear_attention"]
        layers = list(range(len(heads)))
        if recurrent:
            manager = {"v1": MambaHybridCacheManager, "v2": MambaHybridCacheManagerV2}[kind]
            # Layers that cache nothing are not the manager's; the head's, if it shares, comes behind the target's.
            layers = [layer for layer in layers if layer >= count or kinds[layer] != "mlp"]
            heads = [0 if layer in recurrent else heads[layer] for layer in layers]
            dims = [dims[layer] for layer in layers]
        self.kv_cache_manager = manager(
            num_layers=len(heads),
            num_kv_heads=heads,
            head_dim=dims[0],
            layer_head_dims=dims,
            layer_ids=layers,
            num_blocks=num_blocks,
            kv_factor=2 if latent is None else 1,
            **options,
        )
        if recurrent:
            self.kv_cache_manager.make_states(
                recurrent, config.hidden_size, max_batch_size=self.max_batch_size, replay=self._replay,
                nodes=self.kv_cache_manager.max_total_draft_tokens + 1, dtype=self.model_config.torch_dtype,
            )  # fmt: skip
        is_tree = getattr(self.spec_config, "use_dynamic_tree", False) and draft is not None
        is_tree = bool(is_tree and (self.spec_config.dynamic_tree_max_topK or 0) > 1)
        self.tree_resources: Any = None
        if is_tree and self.model.drafts_with_mtp:
            self.tree_resources = MTPEagleDynamicTreeResourceManager(
                self.spec_config, self.model_config.torch_dtype, config.hidden_size, self.max_batch_size
            )
        elif is_tree:
            self.tree_resources = Eagle3OneModelDynamicTreeResourceManager(
                self.spec_config, self.max_batch_size
            )
        managers = {
            ResourceManagerType.SPEC_RESOURCE_MANAGER: self.tree_resources,
            ResourceManagerType.DRAFT_KV_CACHE_MANAGER: self.draft_kv_cache_manager,
            ResourceManagerType.KV_CACHE_MANAGER: self.kv_cache_manager,
        }
        self.resource_manager = ResourceManager(managers)

    def _spec_metadata(self, max_num_tokens: int, dtype: torch.dtype) -> Eagle3OneModelSpecMetadata:
        spec, config = self.spec_config, self.model_config.pretrained_config
        is_tree = self.tree_resources is not None
        return Eagle3OneModelSpecMetadata(
            max_num_requests=self.max_batch_size, max_draft_len=spec.max_draft_len,
            max_total_draft_tokens=spec.tokens_per_gen_step - 1, spec_dec_mode=spec.spec_dec_mode,
            num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, dtype=dtype,
            max_num_tokens=max(max_num_tokens, self.max_batch_size * spec.tokens_per_gen_step),
            layers_to_capture=getattr(spec, "eagle3_layers_to_capture", None), is_spec_dec_tree=is_tree,
            is_spec_dec_dynamic_tree=is_tree, spec_resource_manager=self.tree_resources, vocab_size=config.vocab_size,
        )  # fmt: skip

    def warmup(self) -> None:
        """A prefill of a dummy, then decode steps of dummies alone, which are captured on CUDA."""
        window, reserve = self.sampler.draft_len + 1, self._dummy_rows()
        dummies = [
            LlmRequest(DUMMY_ID + i, [1] * (window + 1), is_cuda_graph_dummy=True, py_prompt_len=window)
            for i in range(self.max_batch_size)
        ]
        for manager in self._kv_managers():
            manager.add_dummy_requests([dummy.py_request_id for dummy in dummies[:1]], reserve)
        if hasattr(self.tree_resources, "add_dummy_requests"):
            self.tree_resources.add_dummy_requests([dummies[0].py_request_id])
        self._dummy = dummies[0]
        self.engine.forward(ScheduledRequests(context_requests=[self._dummy]))
        for size in self.graph_batch_sizes[::-1]:
            # One dummy in every row: they write the same rows of the same blocks.
            self.engine.capture(ScheduledRequests(generation_requests=[self._dummy] * size))

    def _dummy_rows(self) -> int:
        top_k = getattr(self.spec_config, "dynamic_tree_max_topK", None) or 1
        return 4 * (self.sampler.draft_len + 1) + top_k * self.sampler.max_path_len

    def _kv_managers(self) -> list[KVCacheManager]:
        return [one for one in (self.draft_kv_cache_manager, self.kv_cache_manager) if one is not None]

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        end_ids: Sequence[int] = (),
        sampling: SamplingConfig | None = None,
    ) -> LlmRequest:
        """Queue a request; it is prefilled by a later `step`, when a slot is free."""
        request = LlmRequest(
            self._next_id, list(prompt), max_tokens, sampling or SamplingConfig(), end_ids=tuple(end_ids)
        )
        self._next_id += 1
        self._waiting.append(request)
        return request

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, end_ids: Sequence[int] = (),
        sampling: Sequence[SamplingConfig] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Run all of them to the end; returns the generated tokens."""
        configs = sampling or [SamplingConfig() for _ in prompts]
        requests = [
            self.submit(prompt, max_tokens=max_tokens, end_ids=end_ids, sampling=config)
            for prompt, config in zip(prompts, configs, strict=True)
        ]
        while self.step():
            pass
        return [request.generated for request in requests]

    def step(self) -> bool:
        """One iteration; False when nothing is left to do."""
        batch = self._schedule()
        launched = None
        if batch.batch_size:
            self.resource_manager.prepare_resources(batch)
            launched = (batch, self._launch(batch))
        if self.overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            self._finish(*launched)
        return bool(self._waiting or self._active or self._in_flight)

    def _schedule(self) -> ScheduledRequests:
        while self._waiting and self._free_slots:
            request = self._waiting.pop(0)
            request.py_seq_slot = self._free_slots.pop()
            self._active.append(request)
        batch = ScheduledRequests()
        for request in self._active:
            if request.state == LlmRequestState.GENERATION_IN_PROGRESS:
                batch.generation_requests.append(request)
            elif request.state == LlmRequestState.CONTEXT_INIT:
                left = request.py_prompt_len - request.context_current_position
                request.context_chunk_size = min(self.max_chunk or left, left)
                batch.context_requests.append(request)
        # Prompts that do not end come first.
        batch.context_requests.sort(key=lambda request: request.is_last_context_chunk)
        return batch

    def _launch(self, batch: ScheduledRequests) -> SampleState:
        padded = batch
        if not batch.context_requests:
            size = next((one for one in self.graph_batch_sizes if one >= batch.batch_size), batch.batch_size)
            dummies = [self._dummy] * (size - batch.batch_size) if size > batch.batch_size else []
            padded = ScheduledRequests(generation_requests=batch.generation_requests + dummies)
        outputs = self.engine.forward(padded)
        if not isinstance(outputs, dict):
            outputs = _plain(outputs)
        state = self.sampler.sample_async(padded, outputs)
        for request in batch.context_requests:
            if request.is_last_context_chunk:
                request.state = LlmRequestState.GENERATION_IN_PROGRESS
            request.move_to_next_context_chunk()
        for request in batch.all_requests():
            request.pending_step = self.overlap
        return state

    def _finish(self, batch: ScheduledRequests, state: SampleState) -> None:
        """Tokens, rewinds, and the end of requests that are done."""
        later = [] if self._in_flight is None else self._in_flight[0].all_requests()
        done_before = [r for r in batch.all_requests() if r.state == LlmRequestState.GENERATION_COMPLETE]
        self.sampler.update_requests(state)
        live = [request for request in batch.generation_requests if request not in done_before]
        self.resource_manager.update_resources(ScheduledRequests(batch.context_requests, live))
        for request in batch.all_requests():
            request.pending_step = any(request is one for one in later)
            if request.state == LlmRequestState.GENERATION_COMPLETE and not request.pending_step:
                self.resource_manager.free_resources(request)
                assert request.py_seq_slot is not None
                self._free_slots.append(request.py_seq_slot)
                self._active = [one for one in self._active if one is not request]


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _plain(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the sampler makes of logits: greedy tokens, one a request."""
    tokens = logits.argmax(dim=-1).int()[:, None]
    return {
        "new_tokens": tokens, "next_new_tokens": tokens, "next_draft_tokens": tokens[:, :0],
        "new_tokens_lens": torch.ones_like(tokens[:, 0]),
    }  # fmt: skip
