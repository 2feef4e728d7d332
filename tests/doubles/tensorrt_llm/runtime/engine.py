"""One model step: inputs on fixed buffers, metadata, the call, and decode graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .layout import device
from .metadata import KVCacheParams, TrtllmAttentionMetadata
from .requests import LlmRequest, ScheduledRequests
from .sampler import SpecSampler


@dataclass
class StepState:
    """Metadata and buffers of one kind of step, and its graph if it has one."""

    attn_metadata: TrtllmAttentionMetadata
    spec_metadata: Any
    graph: torch.cuda.CUDAGraph | None = None
    outputs: Any = None


class ModelEngine:
    """Runs batches of context and generation requests.

    Args:
        make_spec_metadata: called once, None without speculation.
        overlap: lengths on the host are the last step's but one; the device corrects them.
    """

    def __init__(
        self, model: Any, resource_manager: Any, sampler: SpecSampler, *, kv_cache_manager: Any,
        draft_kv_cache_manager: Any, spec_config: Any, spec_metadata: Any, spec_tree_manager: Any,
        max_batch_size: int, max_num_tokens: int, overlap: bool,
    ) -> None:  # fmt: skip
        self.model, self.resource_manager, self.sampler = model, resource_manager, sampler
        self.kv_cache_manager, self.spec_config = kv_cache_manager, spec_config
        self.spec_tree_manager, self.overlap, self.max_batch_size = spec_tree_manager, overlap, max_batch_size
        self.draft_len = sampler.draft_len
        metadata = TrtllmAttentionMetadata(
            max_num_requests=max_batch_size, max_num_tokens=max_num_tokens, kv_cache_manager=kv_cache_manager,
            draft_kv_cache_manager=draft_kv_cache_manager, mapping=model.model_config.mapping,
        )  # fmt: skip
        self.eager = StepState(metadata, spec_metadata)
        self.graphs: dict[int, StepState] = {}
        rows = max(max_num_tokens, max_batch_size * (self.draft_len + 1))
        place = {"dtype": torch.int32, "device": device()}
        self.input_ids, self.position_ids = torch.zeros(rows, **place), torch.zeros(rows, **place)
        self.gather_ids = torch.zeros(rows, dtype=torch.int64, device=device())
        self.draft_tokens = torch.zeros(max(rows, 1), **place)
        # What the last step accepted less what the host assumed, by row and by request.
        self.previous_pos_id_offsets = torch.zeros(rows, **place)
        self.previous_kv_lens_offsets = torch.zeros(max_batch_size, **place)

    @torch.inference_mode()
    def forward(self, batch: ScheduledRequests) -> Any:
        """Run one step; returns the worker's results, or logits without speculation."""
        captured = not batch.context_requests and self.graphs.get(batch.batch_size)
        state = captured or self.eager
        inputs = self._prepare(batch, state)
        if captured and state.graph is not None:
            state.graph.replay()
            return state.outputs
        return self._call(inputs, state)

    @torch.inference_mode()
    def capture(self, batch: ScheduledRequests) -> None:
        """Warm up and capture a decode step of dummies; without CUDA, only give the batch size its own metadata."""
        size = batch.batch_size
        spec = self.eager.spec_metadata
        state = StepState(
            self.eager.attn_metadata.create_cuda_graph_metadata(size, self.draft_len),
            None if spec is None else spec.create_cuda_graph_metadata(size),
        )
        inputs = self._prepare(batch, state)
        for _ in range(2):
            self._call(inputs, state)
            self._undo_corrections(inputs, state)
        if device().type == "cuda":
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                state.outputs = self._call(inputs, state)
            self._undo_corrections(inputs, state)
            state.graph = graph
        self.graphs[size] = state

    def _call(self, inputs: dict[str, Any], state: StepState) -> Any:
        meta, split = state.attn_metadata, state.attn_metadata.num_contexts
        if self.overlap:
            rows = inputs["position_ids"][0, meta.num_ctx_tokens :]
            rows += self.previous_pos_id_offsets[: rows.shape[0]]
            meta.kv_lens_cuda[split : meta.num_seqs] += self.previous_kv_lens_offsets[: meta.num_generations]
            meta.on_update_kv_lens()
        return self.model.forward(**inputs, attn_metadata=meta, resource_manager=self.resource_manager)

    def _undo_corrections(self, inputs: dict[str, Any], state: StepState) -> None:
        if self.overlap:
            meta = state.attn_metadata
            rows = inputs["position_ids"][0, meta.num_ctx_tokens :]
            rows -= self.previous_pos_id_offsets[: rows.shape[0]]
            lens = meta.kv_lens_cuda[meta.num_contexts : meta.num_seqs]
            lens -= self.previous_kv_lens_offsets[: meta.num_generations]

    def _prepare(self, batch: ScheduledRequests, state: StepState) -> dict[str, Any]:
        meta, window = state.attn_metadata, self.draft_len + 1
        contexts, generations = batch.context_requests, batch.generation_requests
        starts = [request.context_current_position for request in contexts]
        lengths = [request.context_chunk_size for request in contexts]
        spans = zip(contexts, starts, lengths, strict=True)
        tokens = [token for request, start, count in spans for token in request.tokens[start : start + count]]
        prompt_lens = lengths + [request.py_prompt_len for request in generations]
        cached = starts + [self._past(request) for request in generations]
        lengths = lengths + [window] * len(generations)
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
        positions = [
            past + row for past, length in zip(cached, lengths, strict=True) for row in range(length)
        ]
        num_tokens, num_context_tokens = len(positions), len(tokens)
        self.input_ids[:num_context_tokens].copy_(torch.tensor(tokens, dtype=torch.int32))
        self.position_ids[:num_tokens].copy_(torch.tensor(positions, dtype=torch.int32))
        self._tokens_from_slots(generations, num_context_tokens)
        meta.request_ids = [request.py_request_id for request in batch.all_requests()]
        meta.prompt_lens = prompt_lens
        for index, request in enumerate(batch.all_requests()):
            request.py_batch_idx = index
        meta.kv_cache_manager = self.kv_cache_manager
        extra = 0 if self.spec_config is None else self.kv_cache_manager.num_extra_kv_tokens
        meta.kv_cache_params = KVCacheParams(True, cached, extra)
        meta.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        meta.num_contexts = len(contexts)
        meta.prepare()
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids[:num_tokens],
            "position_ids": self.position_ids[:num_tokens].unsqueeze(0),
            "inputs_embeds": None,
        }
        if state.spec_metadata is not None:
            gather = ends[: len(contexts)].tolist() + list(range(num_context_tokens, num_tokens))
            self.gather_ids[: len(gather)].copy_(torch.tensor(gather))
            self._prepare_spec(batch, state, len(gather), num_tokens, lengths)
            inputs["spec_metadata"] = state.spec_metadata
        return inputs

    def _past(self, request: LlmRequest) -> int:
        """Rows that the host believes to be cached: under overlap as if the whole last window were kept."""
        past = request.max_beam_num_tokens - 1
        if not self.overlap or request.is_cuda_graph_dummy:
            return past
        assert request.py_batch_idx is not None
        return past + (self.draft_len + 1 if request.pending_step else 0)

    def _tokens_from_slots(self, generations: Sequence[LlmRequest], first: int) -> None:
        """Tokens of generation rows, and under overlap the corrections, come from the device."""
        if not generations:
            return
        window, count = self.draft_len + 1, len(generations)
        # Dummies read slot 0: their rows do not matter.
        slots = [0 if request.py_seq_slot is None else request.py_seq_slot for request in generations]
        index = torch.tensor(slots, device=device())
        rows = self.sampler.next_new_tokens.squeeze(-1).T[index]
        self.input_ids[first : first + count * window].copy_(rows.reshape(-1))
        drafts = self.sampler.next_draft_tokens[index]
        self.draft_tokens[: drafts.numel()].copy_(drafts.reshape(-1))
        pending = torch.tensor([request.pending_step for request in generations], device=device())
        offsets = torch.where(pending, self.sampler.new_tokens_lens[index] - window, 0).int()
        self.previous_kv_lens_offsets[:count].copy_(offsets)
        self.previous_pos_id_offsets[: count * window].copy_(offsets.repeat_interleave(window))

    def _prepare_spec(
        self,
        batch: ScheduledRequests,
        state: StepState,
        num_gathered: int,
        num_tokens: int,
        lengths: list[int],
    ) -> None:
        spec, meta, config = state.spec_metadata, state.attn_metadata, self.spec_config
        spec.request_ids, spec.seq_lens = meta.request_ids, lengths
        spec.num_generations, spec.num_tokens = batch.num_generation_requests, num_tokens
        spec.runtime_draft_len = self.draft_len
        spec.runtime_tokens_per_gen_step = config.get_runtime_tokens_per_gen_step(self.draft_len)
        spec.gather_ids = self.gather_ids[:num_gathered]
        spec.draft_tokens = self.draft_tokens[: batch.num_generation_requests * self.draft_len]
        if self.spec_tree_manager is not None:
            self.spec_tree_manager.slot_storage.fill_all_slot_ids(
                batch.context_requests, batch.generation_requests
            )
        meta.update_spec_dec_param(
            batch_size=batch.batch_size, is_spec_decoding_enabled=True, is_spec_dec_tree=spec.is_spec_dec_tree,
            is_spec_dec_dynamic_tree=spec.is_spec_dec_dynamic_tree, max_draft_len=config.max_draft_len,
            max_total_draft_tokens=self.draft_len, spec_metadata=spec, spec_tree_manager=self.spec_tree_manager,
            num_contexts=batch.num_context_requests,
        )  # fmt: skip
        spec.prepare()
