"""One decode step on the device, and the same step as CUDA graphs.

A step is: open the hook's window, forward it, close it. It reads pool slots and committed lengths and leaves the
kept tokens; everything between lies on the device. So on a GPU it is captured once a batch size and replayed: a
small model's step is a thousand launches, which the host cannot issue as fast as the GPU runs them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from trtllm_tree.engine.kv_cache import KVCache
from trtllm_tree.engine.model_runner import ModelRunner
from trtllm_tree.engine.ports import (
    DecodeBatch,
    DecodeHook,
    ForwardBatch,
    LogitEditor,
    LogprobReader,
    StepTokens,
    TokenDraws,
)
from trtllm_tree.kernels.window_slots import window_slots


class DecodeStep:
    """Runs a step eagerly.

    Args:
        runner: the target model.
        cache: KV pools.
        hook: owns the window.
    """

    def __init__(self, runner: ModelRunner, cache: KVCache, hook: DecodeHook) -> None:
        self._runner, self._cache, self.hook = runner, cache, hook
        self.device = runner.device

    def run(self, slots: Sequence[int], committed_lens: Sequence[int]) -> StepTokens:
        """Decode the requests in pool slots `slots` [B] with `committed_lens` [B] tokens in the cache."""
        return self.forward(
            torch.tensor(slots, dtype=torch.int64, device=self.device),
            torch.tensor(committed_lens, dtype=torch.int32, device=self.device),
            max(committed_lens),
        )

    def forward(
        self, slots: torch.Tensor, committed_lens: torch.Tensor, max_committed_len: int
    ) -> StepTokens:
        """The step on device tensors: `slots` int64 [B], `committed_lens` int32 [B] and their host-side bound."""
        hook = self.hook
        tables = tuple(group.page_table[slots] for group in self._cache.groups)
        write_slots = committed_lens.new_empty(len(tables), slots.shape[0], hook.window_len)
        for group, table, group_slots in zip(self._cache.groups, tables, write_slots, strict=True):
            window_slots(
                committed_lens,
                table,
                num_rows=hook.window_len,
                page_size=group.page_size,
                slots=group_slots,
            )
        batch = DecodeBatch(slots, committed_lens, tables, write_slots, max_committed_len)
        window = hook.open_window(batch)
        rows = ForwardBatch(
            token_ids=window.token_ids.reshape(-1).long(),
            positions=window.positions.reshape(-1),
            write_slots=write_slots.flatten(1).unbind(),
            page_tables=tables,
            attention=window.attention,
        )
        return hook.close_window(batch, window, self._runner.forward(rows, self._cache))


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    slots: torch.Tensor
    committed_lens: torch.Tensor
    result: StepTokens


class DecodeGraphs:
    """Replays captured steps, one graph a batch size (powers of two, and the largest) and kind of step.

    A batch between two sizes is filled up with pad rows: the pad slot owns no page and has no committed token, so
    its rows write to the dummy page and nobody reads them.

    Args:
        step: the eager step; runs instead while the hook is not graph-safe.
        draws, edits, logprobs: planned for the step that is run.
        max_batch_size: also the index of the pad slot.
        max_seq_len: bound of every committed length.
    """

    def __init__(
        self,
        step: DecodeStep,
        draws: TokenDraws,
        edits: LogitEditor,
        logprobs: LogprobReader,
        *,
        max_batch_size: int,
        max_seq_len: int,
    ) -> None:
        self._planned = (draws, edits, logprobs)
        self._step, self._max_batch_size, self._max_seq_len = step, max_batch_size, max_seq_len
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[Hashable, ...], _Captured] = {}

    def run(self, slots: Sequence[int], committed_lens: Sequence[int]) -> StepTokens:
        """See `DecodeStep.run`."""
        if not self._step.hook.graph_safe:
            return self._step.run(slots, committed_lens)
        size = min(1 << (len(slots) - 1).bit_length(), self._max_batch_size)
        key = (size, *(planned.kind for planned in self._planned))
        if key not in self._captured:
            self._captured[key] = self._capture(size)
        captured, num_pads = self._captured[key], size - len(slots)
        captured.slots.copy_(torch.tensor([*slots, *[self._max_batch_size] * num_pads]))
        captured.committed_lens.copy_(torch.tensor([*committed_lens, *[0] * num_pads], dtype=torch.int32))
        captured.graph.replay()
        kept = slice(len(slots))
        result = captured.result
        logprobs = None
        if result.logprobs is not None:
            values, ids, ranks = result.logprobs
            logprobs = values[kept], ids[kept], ranks[kept]
        return StepTokens(result.tokens[kept], result.num_tokens[kept], logprobs)

    def _capture(self, size: int) -> _Captured:
        """Capture a step of `size` pad rows. The run that compiles and warms up before it touches no request."""
        device = self._step.device
        slots = torch.full((size,), self._max_batch_size, dtype=torch.int64, device=device)
        committed_lens = torch.zeros(size, dtype=torch.int32, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step.forward(slots, committed_lens, self._max_seq_len)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._step.forward(slots, committed_lens, self._max_seq_len)
        return _Captured(graph, slots, committed_lens, result)
