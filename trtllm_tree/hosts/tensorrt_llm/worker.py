"""The worker that TensorRT-LLM's model calls behind its logits: one round of ours, in its chain-shaped words.

`open_window` runs before the target's layers and makes the generation rows a tree; the worker call behind them
verifies, compacts, drafts, and returns what a chain would. A pure decode call neither waits for the device nor makes
buffers that outlive it, so TensorRT-LLM captures it, before there is any tree. Must not know how attention runs, how
pages are encoded or how the head is called. Importing this module imports no TensorRT-LLM.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_tree.attention.cascade import TreeCascadeRows
from trtllm_tree.config.host_rules import DEFAULT_VERIFY_MODE, VERIFY_MODES, VERIFY_VARIABLE
from trtllm_tree.errors import ConfigError, HostError, Problem, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.refusals import guided_decoding_refusal, runtime_refusals
from trtllm_tree.hosts.tensorrt_llm.slots import ContextRow
from trtllm_tree.hosts.tensorrt_llm.step import TreeStep, publish
from trtllm_tree.hosts.tensorrt_llm.translate import plain_config
from trtllm_tree.hosts.tensorrt_llm.worker_parts import Managers, WorkerParts, build_parts
from trtllm_tree.ports import RoundBatch
from trtllm_tree.round import SpecRound, VerifyWindow

FORCED_VARIABLE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


def verify_mode(spec_config: Any, environment: Mapping[str, str] = os.environ) -> str:
    """Which sampling backend verifies.

    Raises:
        ConfigError: the variable holds another word.
    """
    mode = environment.get(VERIFY_VARIABLE, "")
    if not mode:
        rejects = getattr(spec_config, "use_rejection_sampling", False)
        return "rejection" if rejects else DEFAULT_VERIFY_MODE
    if mode not in VERIFY_MODES:
        rule = f"must be one of {', '.join(VERIFY_MODES)}"
        remedy = f"Set {VERIFY_VARIABLE} to {DEFAULT_VERIFY_MODE}."
        raise ConfigError(Problem(VERIFY_VARIABLE, mode, rule, remedy))
    return mode


@dataclass(frozen=True)
class _Batch:
    """How a step's rows lie: `num_contexts` prompts first, then `size` requests of N rows each."""

    num_contexts: int
    num_context_rows: int
    size: int

    @classmethod
    def of(cls, attn_metadata: Any) -> _Batch:
        contexts, rows = int(attn_metadata.num_contexts), int(attn_metadata.num_ctx_tokens)
        return cls(contexts, rows, int(attn_metadata.num_seqs) - contexts)

    @property
    def total(self) -> int:
        return self.num_contexts + self.size

    @property
    def requests(self) -> slice:
        """The generation requests."""
        return slice(self.num_contexts, self.total)


class TreeWorkerRound:
    """The worker without TensorRT-LLM's base class, which comes in with `tree_eagle_worker`.

    The base class has `spec_config`, `get_draft_kv_cache_manager` and `draft_kv_cache_context`.
    """

    spec_config: Any
    get_draft_kv_cache_manager: Any
    draft_kv_cache_context: Any

    def prepare_rounds(self, draft_model: Any, manager_types: Any) -> None:
        """Called once, by the model that owns this worker.

        Args:
            draft_model: TensorRT-LLM's module of the head.
            manager_types: its `ResourceManagerType`.

        Raises:
            ConfigError: an environment variable that cannot be honoured.
        """
        self._mode = verify_mode(self.spec_config)
        self._config = plain_config(self.spec_config)
        # A tuple, because a module would register the head a second time as its own child.
        self._head = (draft_model,)
        self._manager_types = manager_types
        self._parts: WorkerParts | None = None
        self._open: tuple[RoundBatch, VerifyWindow] | None = None
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
        batch = _Batch.of(attn_metadata)
        assert batch.total <= parts.buffers.max_batch, f"a batch of {batch.total} requests"
        if not batch.size:
            return
        assert input_ids is not None, "a tree needs the token ids of its rows"
        size, nodes, first_row = batch.size, self._config.num_nodes, batch.num_context_rows
        rows = slice(first_row, first_row + size * nodes)
        tokens, positions = parts.buffers.tokens[:size], parts.buffers.positions[:size]
        tokens.copy_(input_ids[rows].view(size, nodes))
        lens = attn_metadata.kv_lens_cuda[batch.requests]
        committed = torch.sub(lens, nodes, out=parts.buffers.committed_lens[:size])
        torch.add(committed.unsqueeze(1), parts.buffers.node_index, out=positions)
        tables = parts.pool.load_tables(
            attn_metadata.kv_cache_block_offsets, batch.requests, self._capacity(parts, attn_metadata, lens)
        )
        round_batch = RoundBatch(
            slots=parts.storage.all_ids_buf[batch.requests],
            committed_lens=committed,
            write_slots=parts.pool.write_slots(committed, tables, nodes),
            draft_page_table=self._draft_table(parts, attn_metadata, batch.requests, lens),
            draft_page_size=parts.draft_pool.page_size,
            max_committed_len=parts.pool.max_pages * parts.pool.page_size,
        )
        tree = parts.tree.spec.load_step(parts.tree.parents.parents, round_batch.slots, positions)
        if position_ids is not None:
            position_ids.view(-1)[rows].view(size, nodes).copy_(positions)
        window = VerifyWindow(tokens, positions, tree)
        self._open = round_batch, window
        publish(attn_metadata, _verify_step(parts, round_batch, window, tables))

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
            hidden_states: [T, H], the target's last hidden rows; the head is fed what was captured of its layers.
            logits: [contexts + generations * N, V]: of every prompt's last row, then of all generation rows.

        Returns:
            `logits` as given; int32 `new_tokens` [B, S+1], `new_tokens_lens` [B], `next_draft_tokens` [B, N-1] and
            `next_new_tokens` [B, N]. They live until the next call.
        """
        parts, batch = self._parts, _Batch.of(attn_metadata)
        if not self._is_drafting(attn_metadata, spec_metadata, resource_manager):
            return self._nothing(logits, batch)
        assert parts is not None, "the model's forward opened no window"
        features = spec_metadata.hidden_states[:, : _feature_size(spec_metadata)]
        draft_kv = self.draft_kv_cache_context(attn_metadata, parts.managers.draft_kv)
        with parts.draft_model.bind(attn_metadata, spec_metadata, draft_kv):
            prompts = None
            if batch.num_contexts:
                prompts = self._end_prompts(
                    parts, batch, attn_metadata, input_ids, position_ids, features, logits
                )
            if batch.size:
                self._close_window(parts, batch, features, logits)
            if prompts is not None:
                parts.round.start(*prompts)
        return {"logits": logits} | _results(parts, batch.total)

    def _close_window(
        self, parts: WorkerParts, batch: _Batch, features: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """Verify, compact and draft for the generation requests."""
        assert self._open is not None, "no window is open: the model's forward did not open one"
        (round_batch, window), self._open = self._open, None
        rows = batch.size * self._config.num_nodes
        first_row = batch.num_context_rows
        parts.hidden[:rows].copy_(features[first_row : first_row + rows])
        accepted = parts.round.close_window(round_batch, window, logits[batch.num_contexts :])
        new_tokens = parts.buffers.new_tokens[batch.requests]
        path_len = new_tokens.shape[1]
        # -1 stands behind the kept tokens, and for a row of NaN; TensorRT-LLM may look any token up.
        torch.clamp(accepted.predict[:, :path_len], min=0, out=new_tokens)
        # Only a slot without a tree, whose dummy tokens are a chain of N, can keep more.
        torch.clamp(accepted.accept_len, max=path_len, out=parts.buffers.new_lens[batch.requests])

    def _end_prompts(
        self,
        parts: WorkerParts,
        batch: _Batch,
        attn_metadata: Any,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        features: torch.Tensor,
        logits: torch.Tensor,
    ) -> tuple[RoundBatch, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Run the head over the prompts' rows; the arguments of `SpecRound.start` for those whose prefill ended."""
        contexts, num_rows, device = batch.num_contexts, batch.num_context_rows, logits.device
        slots = parts.storage.all_ids_buf[:contexts]
        prompts = parts.storage.trees.context_rows[:contexts]
        last_rows = attn_metadata.seq_lens[:contexts].cumsum(0).long() - 1
        last_rows = last_rows.to(device, non_blocking=True)
        positions = position_ids.reshape(-1)[:num_rows].long()
        first = parts.draws.draw(logits[:contexts], slots, positions[last_rows].unsqueeze(1)).clamp(min=0)
        parts.buffers.new_tokens[:contexts].zero_()
        parts.buffers.new_tokens[:contexts, 0].copy_(first)
        parts.buffers.new_lens[:contexts].fill_(1)
        ended = [row for row in range(contexts) if row >= len(prompts) or prompts[row].is_last]
        tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        tokens[:-1].copy_(input_ids[1:num_rows])
        tokens.index_copy_(0, last_rows, _behind_prompts(first, prompts))
        hidden = parts.draft_model.prefill_rows(
            tokens, parts.draft_model.fuse(features[:num_rows]), positions
        )
        if len(ended) < contexts:
            # A slot whose prompt goes on may still hold what the request before left there.
            parts.round.future_input_map.index_fill_(0, slots, 0)
        if not ended:
            return None
        index = torch.tensor(ended).to(device, non_blocking=True)
        last_rows, frontier = last_rows[index], (positions[last_rows[index]] + 1).int()
        lens = attn_metadata.kv_lens_cuda[index]
        started = RoundBatch(
            slots=slots[index],
            committed_lens=frontier,
            write_slots=slots.new_empty(0, len(ended), self._config.num_nodes, dtype=torch.int32),
            draft_page_table=self._draft_table(parts, attn_metadata, index, lens),
            draft_page_size=parts.draft_pool.page_size,
            max_committed_len=parts.pool.max_pages * parts.pool.page_size,
        )
        return started, hidden[last_rows], first[index], frontier

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

    def _capacity(self, parts: WorkerParts, attn_metadata: Any, kv_lens: torch.Tensor) -> torch.Tensor:
        """Rows that are surely allocated to sequences of these lengths, window included."""
        extra = getattr(attn_metadata.kv_cache_params, "num_extra_kv_tokens", None) or 0
        return torch.add(kv_lens, extra, out=parts.buffers.capacity[: kv_lens.shape[0]])

    def _draft_table(
        self, parts: WorkerParts, attn_metadata: Any, requests: slice | torch.Tensor, kv_lens: torch.Tensor
    ) -> torch.Tensor:
        """Pages of the head's cache, int32 [B, max_pages]."""
        separate = parts.managers.draft_kv is not None
        offsets = (
            attn_metadata.draft_kv_cache_block_offsets if separate else attn_metadata.kv_cache_block_offsets
        )
        capacity = self._capacity(parts, attn_metadata, kv_lens)
        return parts.draft_pool.load_tables(offsets, requests, capacity)[0]

    def _nothing(self, logits: torch.Tensor, batch: _Batch) -> dict[str, torch.Tensor]:
        """The results of a step that only measures memory."""
        nodes = self._config.num_nodes
        tokens = logits.new_zeros(batch.total, nodes, dtype=torch.int32)
        return {
            "logits": logits,
            "new_tokens": tokens[:, : self._config.num_steps + 1],
            "new_tokens_lens": logits.new_ones(batch.total, dtype=torch.int32),
            "next_draft_tokens": tokens[:, 1:],
            "next_new_tokens": tokens,
        }

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
            # Slots are also written between the steps, where TensorRT-LLM is not in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self._parts = build_parts(
                    managers,
                    self._config,
                    mode=self._mode,
                    draft_model=self._head[0],
                    feature_size=_feature_size(spec_metadata),
                    dtype=spec_metadata.hidden_states.dtype,
                )
        return self._parts


@functools.cache
def tree_eagle_worker(base: type) -> Any:
    """`TreeEagleWorker` over TensorRT-LLM's `Eagle3OneModelWorker`, overriding what is overridden there."""
    call = "_forward_impl" if hasattr(base, "_forward_impl") else "forward"
    members = {"__doc__": TreeWorkerRound.__doc__, "__module__": __name__, call: TreeWorkerRound.run_round}
    return type(base)("TreeEagleWorker", (TreeWorkerRound, base), members)


def _verify_step(
    parts: WorkerParts, batch: RoundBatch, window: VerifyWindow, tables: torch.Tensor
) -> TreeStep:
    """What the target's attention is told: int32 `tables` [G, B, max_pages] are the target's pages."""
    assert window.tree is not None, "a chain was opened"
    rows = TreeCascadeRows(
        prefix_lens=batch.committed_lens,
        mask=window.tree.ancestor_mask,
        window=window.tokens.shape[1],
        max_prefix_len=batch.max_committed_len,
        row_depths=window.tree.depths,
        column_depths=window.tree.depths,
    )
    return TreeStep(
        mode="verify",
        pool=parts.pool,
        rows=rows,
        positions=window.positions,
        write_slots=batch.write_slots,
        page_tables=tables,
    )


def _results(parts: WorkerParts, size: int) -> dict[str, torch.Tensor]:
    """What the requests of a step kept, and the windows that lie in their slots now."""
    buffers = parts.buffers
    next_tokens = buffers.next_tokens[:size]
    torch.index_select(parts.round.future_input_map, 0, parts.storage.all_ids_buf[:size], out=next_tokens)
    return {
        "new_tokens": buffers.new_tokens[:size],
        "new_tokens_lens": buffers.new_lens[:size],
        # Contiguous: a captured graph's outputs may be remembered by address and shape alone.
        "next_draft_tokens": buffers.next_drafts[:size].copy_(next_tokens[:, 1:]),
        "next_new_tokens": next_tokens,
    }


def _feature_size(spec_metadata: Any) -> int:
    return spec_metadata.hidden_size * len(spec_metadata.layers_to_capture)


def _behind_prompts(first: torch.Tensor, prompts: Sequence[ContextRow]) -> torch.Tensor:
    """The token behind each prompt's rows, int32 [C]: the first drawn one, or the prompt's next where it goes on."""
    goes_on = [(row, prompt.next_token) for row, prompt in enumerate(prompts) if not prompt.is_last]
    if not goes_on:
        return first
    rows, tokens = torch.tensor(goes_on, dtype=torch.int64).t().to(first.device, non_blocking=True)
    return first.index_copy(0, rows, tokens.int())
