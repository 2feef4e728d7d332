"""The worker that TensorRT-LLM's model calls behind its logits: one round of ours, in its chain-shaped words.

`open_window` runs before the target's layers and makes the generation rows a tree; the worker call behind them
verifies, compacts, drafts, and returns what a chain would. A pure decode call neither waits for the device nor makes
buffers that outlive it, so TensorRT-LLM captures it, before there is any tree. Must not know how attention runs, how
pages are encoded, who drafts or what a prompt needs. Importing this module imports no TensorRT-LLM.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from trtllm_tree.attention.rows import verify_rows
from trtllm_tree.errors import ConfigError, HostError, Problem, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.batch import StepBatch, round_batch, target_tables
from trtllm_tree.hosts.tensorrt_llm.draft_heads import DraftHead
from trtllm_tree.hosts.tensorrt_llm.prompts import end_prompts
from trtllm_tree.hosts.tensorrt_llm.refusals import guided_decoding_refusal, runtime_refusals
from trtllm_tree.hosts.tensorrt_llm.results import empty_results, step_results
from trtllm_tree.hosts.tensorrt_llm.step import TreeStep, publish
from trtllm_tree.hosts.tensorrt_llm.translate import plain_config
from trtllm_tree.hosts.tensorrt_llm.worker_parts import Managers, WorkerParts, build_parts, verify_mode
from trtllm_tree.ports import RoundBatch
from trtllm_tree.round import SpecRound, VerifyWindow
from trtllm_tree.sampling.base import Accepted

FORCED_VARIABLE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
# From the target's forward to the worker call behind it.
OpenWindow = tuple[RoundBatch, VerifyWindow]


class TreeWorkerRound:
    """The worker without TensorRT-LLM's base class, which comes in with `tree_eagle_worker`.

    The base class has `spec_config`, `get_draft_kv_cache_manager` and `draft_kv_cache_context`.
    """

    spec_config: Any
    get_draft_kv_cache_manager: Any
    draft_kv_cache_context: Any

    def prepare_rounds(self, make_head: Callable[[], DraftHead], manager_types: Any) -> None:
        """Called once, by the model that owns this worker.

        Args:
            make_head: gives who drafts, when weights are loaded.
            manager_types: its `ResourceManagerType`.

        Raises:
            ConfigError: an environment variable that cannot be honoured.
        """
        self._mode = verify_mode(self.spec_config)
        self._config = plain_config(self.spec_config)
        self._make_head = make_head
        self._manager_types = manager_types
        self._parts: WorkerParts | None = None
        self._open: OpenWindow | None = None
        if getattr(self, "force_num_accepted_tokens", 0):
            rule = "forces how many drafts are accepted, and a tree has no such path"
            value = os.environ.get(FORCED_VARIABLE)
            raise ConfigError(Problem(FORCED_VARIABLE, value, rule, "Unset it, or decode with a chain."))

    @property
    def verify(self) -> str:
        """How trees are verified, one of `VERIFY_MODES`."""
        return self._mode

    @property
    def spec_round(self) -> SpecRound | None:
        """The round, for observers; None before the first warm-up call."""
        return None if self._parts is None else self._parts.round

    def set_guided_decoder(self, guided_decoder: Any) -> bool:
        """Refuses what TensorRT-LLM would apply to the logits of a chain."""
        raise UnsupportedError(guided_decoding_refusal())

    def open_window(
        self,
        attn_metadata: Any,
        spec_metadata: Any,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        resource_manager: Any,
    ) -> None:
        """Make the generation rows of a step trees: before the target's layers run.

        Args:
            input_ids: int32 [T], context rows first, then N rows of each generation request.
            position_ids: integer [1, T] or [T], linear; generation rows are changed in place to vc + depth.
        """
        self._open = None
        publish(attn_metadata, None)
        if not self._is_drafting(attn_metadata, spec_metadata, resource_manager):
            return
        parts = self._parts_over(attn_metadata, spec_metadata, resource_manager)
        batch = StepBatch.of(attn_metadata)
        assert batch.total <= parts.buffers.max_batch, f"a batch of {batch.total} requests"
        if not batch.size:
            return
        assert input_ids is not None, "a tree needs the token ids of its rows"
        window, step = self._load_trees(parts, batch, attn_metadata, input_ids)
        if position_ids is not None:
            rows = batch.rows(self._config.num_nodes)
            position_ids.view(-1)[rows].view_as(step.positions).copy_(step.positions)
        self._open = window
        publish(attn_metadata, step)
        if parts.recurrent is not None:
            parts.recurrent.open(spec_metadata, window[1].tree)

    def _load_trees(
        self, parts: WorkerParts, batch: StepBatch, attn_metadata: Any, input_ids: torch.Tensor
    ) -> tuple[OpenWindow, TreeStep]:
        """The drafted windows of the generation requests, and what the target's attention is told of them."""
        size, nodes, buffers = batch.size, self._config.num_nodes, parts.buffers
        tokens, positions = buffers.tokens[:size], buffers.positions[:size]
        tokens.copy_(input_ids[batch.rows(nodes)].view(size, nodes))
        kv_lens = attn_metadata.kv_lens_cuda[batch.requests]
        committed = torch.sub(kv_lens, nodes, out=buffers.committed_lens[:size])
        torch.add(committed.unsqueeze(1), buffers.node_index, out=positions)
        tables = target_tables(parts, attn_metadata, batch.requests)
        write_slots = parts.pool.write_slots(committed, tables, nodes)
        requests = round_batch(parts, attn_metadata, batch.requests, committed, write_slots)
        tree = parts.tree.spec.load_step(parts.tree.parents.parents, requests.slots, positions)
        step = TreeStep(
            mode="verify",
            pool=parts.pool,
            rows=verify_rows(tree, committed, requests.max_committed_len),
            positions=positions,
            write_slots=write_slots,
            page_tables=tables,
        )
        return (requests, VerifyWindow(tokens, positions, tree)), step

    def run_round(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        resource_manager: Any = None,
    ) -> dict[str, torch.Tensor]:
        """TensorRT-LLM's worker call: `_forward_impl`, or `forward` where that is what is overridden.

        Args:
            hidden_states: [T, H], the target's last hidden rows, behind its final norm.
            logits: [contexts + generations * N, V]: of every prompt's last row, then of all generation rows.

        Returns:
            `logits` as given; int32 `new_tokens` [B, S+1], `new_tokens_lens` [B], `next_draft_tokens` [B, N-1] and
            `next_new_tokens` [B, N]. They live until the next call.
        """
        parts, batch = self._parts, StepBatch.of(attn_metadata)
        if not self._is_drafting(attn_metadata, spec_metadata, resource_manager):
            return empty_results(self._config, batch.total, logits)
        assert parts is not None, "the model's forward opened no window"
        features = parts.draft_model.features(hidden_states, spec_metadata)
        draft_kv = self.draft_kv_cache_context(attn_metadata, parts.managers.draft_kv)
        with parts.draft_model.bind(attn_metadata, spec_metadata, draft_kv):
            prompts = accepted = None
            if batch.num_contexts:
                prompts = end_prompts(parts, batch, attn_metadata, input_ids, position_ids, features, logits)
            if batch.size:
                accepted = self._close_window(parts, batch, features, logits)
            if prompts is not None:
                parts.round.start(*prompts)
        if accepted is not None and parts.recurrent is not None:
            parts.recurrent.close(attn_metadata, accepted, parts.buffers.new_lens[: batch.total])
        return step_results(parts, batch.total, logits)

    def _close_window(
        self, parts: WorkerParts, batch: StepBatch, features: torch.Tensor, logits: torch.Tensor
    ) -> Accepted:
        """Verify, compact and draft for the generation requests."""
        assert self._open is not None, "no window is open: the model's forward did not open one"
        (requests, window), self._open = self._open, None
        rows = features[batch.rows(self._config.num_nodes)]
        parts.hidden[: rows.shape[0]].copy_(rows)
        accepted = parts.round.close_window(requests, window, logits[batch.num_contexts :])
        new_tokens = parts.buffers.new_tokens[batch.requests]
        path_len = new_tokens.shape[1]
        # -1 stands behind the kept tokens, and for a row of NaN; TensorRT-LLM may look any token up.
        torch.clamp(accepted.predict[:, :path_len], min=0, out=new_tokens)
        # Only a slot without a tree, whose dummy tokens are a chain of N, can keep more.
        torch.clamp(accepted.accept_len, max=path_len, out=parts.buffers.new_lens[batch.requests])
        return accepted

    def _is_drafting(self, attn_metadata: Any, spec_metadata: Any, resource_manager: Any) -> bool:
        """Whether a step verifies and drafts, or only measures memory, without a cache."""
        if spec_metadata is None or resource_manager is None or attn_metadata.kv_cache_manager is None:
            return False
        width, nodes = spec_metadata.runtime_draft_len, self._config.num_nodes
        if width != nodes - 1:
            raise HostError(
                f"TensorRT-LLM verifies {width} draft tokens a request, and trees of {nodes - 1} were asked for"
            )
        return True

    def _parts_over(self, attn_metadata: Any, spec_metadata: Any, resource_manager: Any) -> WorkerParts:
        """Our parts over the managers that are there: built on the first call, and again where they were replaced."""
        managers = Managers(
            kv=attn_metadata.kv_cache_manager,
            draft_kv=self.get_draft_kv_cache_manager(resource_manager),
            trees=resource_manager.get_resource_manager(
                self._manager_types.SPEC_RESOURCE_MANAGER
            ).spec_tree_manager,
        )
        if self._parts is None or not self._parts.serve(managers):
            # Old buffers go first: the new ones are as large.
            self._parts = None
            if problems := runtime_refusals(managers.kv):
                raise UnsupportedError(problems)
            head = self._make_head()
            # Slots are also written between the steps, where TensorRT-LLM is not in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self._parts = build_parts(
                    managers,
                    self._config,
                    mode=self._mode,
                    head=head,
                    features=head.feature_shape(spec_metadata),
                )
        return self._parts


@functools.cache
def tree_eagle_worker(base: type, name: str = "TreeEagleWorker") -> Any:
    """The worker over TensorRT-LLM's `Eagle3OneModelWorker` or `MTPEagleWorker`, overriding what it lets us."""
    call = "_forward_impl" if hasattr(base, "_forward_impl") else "forward"
    members = {"__doc__": TreeWorkerRound.__doc__, "__module__": __name__, call: TreeWorkerRound.run_round}
    return type(base)(name, (TreeWorkerRound, base), members)
