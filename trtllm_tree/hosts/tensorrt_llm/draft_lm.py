"""A small language model as `ports.DraftModel`, for a flow that hands out no target features.

It runs on the embedded engine's runner and cache, one cache row of pages a pool slot, and remembers which tokens a
slot's K/V are of. Rejected drafts, requests that come back and requests that end need no call: a sequence that is
drafted for keeps what it shares with its slot's tokens, and the rest is computed again. Must not know TensorRT-LLM,
nor how a request looks there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trtllm_tree.attention.base import LeafShape
from trtllm_tree.attention.cascade import TreeCascade, TreeCascadeRows
from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.attention.leaves.triton import TritonLeaf
from trtllm_tree.attention.rows import ChainRows, TreeAttention
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Candidates, Eagle
from trtllm_tree.engine.chain_attention import PrefillAttention
from trtllm_tree.engine.kv_cache import CacheGroup, GroupSpec, KVCache
from trtllm_tree.engine.layer_options import layer_options
from trtllm_tree.engine.model_runner import ModelRunner, target_layer_specs
from trtllm_tree.engine.ports import ForwardBatch, Segment
from trtllm_tree.errors import Problem
from trtllm_tree.kernels.window_slots import window_slots
from trtllm_tree.ports import RoundBatch
from trtllm_tree.support.report import Supported
from trtllm_tree.tree.lanes import TreeDraftInputs

PAGE_SIZE = 32
# Rows of one prompt forward.
_PREFILL_ROWS = 1024


class DraftLM:
    """Drafts for up to `num_slots` sequences at a time.

    It reads tokens alone, so the port's hidden rows are the rows' logits here, and none enters the next step.

    Args:
        model_dir: local Hugging Face directory, without any of `layer_problems`.
        config: K, S, N.
        num_slots: sequences whose K/V are kept.
        max_seq_len: tokens of the longest sequence drafted for.
        dtype: of weights, activations and K/V.
        device: where it runs.
    """

    # Of the logits.
    dtype = torch.float32
    d2t: torch.Tensor | None

    def __init__(
        self,
        model_dir: Path,
        config: SpeculativeConfig,
        *,
        num_slots: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._runner = ModelRunner(model_dir, dtype=dtype, device=device)
        self.d2t = None
        self.hidden_size = self.vocab_size = int(self._runner.config.vocab_size)
        self._path_len, self._device = config.max_path_len, device
        self._extent = max_seq_len + max(config.lane_window, config.num_steps)
        self._group = self._cache_group(num_slots, dtype)
        self._cache = KVCache([self._group])
        self._cascade = TreeCascade(self._leaf(num_slots, config.num_nodes, dtype))
        self._chains = ChainRows(device)
        # Tokens whose K/V a slot holds, from position 0 on.
        self._seen: list[list[int]] = [[] for _ in range(num_slots)]
        self._eagle = Eagle(self, config, max_batch=num_slots, vocab_size=self.vocab_size, device=device)

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], sequences: Sequence[Sequence[int]]) -> Candidates:
        """Draft behind sequences of at most `max_seq_len` tokens, each in a slot of its own.

        Returns:
            As `Eagle` gives them: the root is a sequence's last token. The next call overwrites them.
        """
        # Whoever kept S + 1 tokens misses as many. Rows that are there already get the same K/V again, so that all
        # sequences have equally many.
        rows = min(self._path_len, *(len(tokens) for tokens in sequences))
        self._prefill(slots, [tokens[:-rows] for tokens in sequences])
        lens = [len(tokens) for tokens in sequences]
        frontier = torch.tensor(lens, dtype=torch.int32, device=self._device)
        index = torch.tensor(slots, device=self._device)
        batch = RoundBatch(
            slots=index,
            committed_lens=frontier,
            write_slots=frontier.new_empty(0, len(slots), self._path_len),
            draft_page_table=self._group.page_table[index],
            draft_page_size=PAGE_SIZE,
            max_committed_len=max(lens),
        )
        tokens = torch.tensor(
            [tokens[-rows:] for tokens in sequences], dtype=torch.int32, device=self._device
        )
        step = torch.arange(rows, device=self._device)
        positions = frontier.long().unsqueeze(1) - rows + step
        last_rows = torch.arange(len(slots), device=self._device) * rows + rows - 1
        last = self.chain_rows(tokens, frontier.new_empty(0), positions, batch, last_rows)
        for slot, sequence in zip(slots, sequences, strict=True):
            self._seen[slot] = list(sequence)
        return self._eagle.draft_from(batch, last.squeeze(1), tokens[:, -1], frontier)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `ports.DraftModel.fuse`; a language model reads no features."""
        return features

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `ports.DraftModel.logits`."""
        return hidden

    def chain_rows(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: RoundBatch,
        last_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `ports.DraftModel.chain_rows`; `hidden` is not looked at."""
        num_rows = token_ids.shape[1]
        first = positions[:, 0].int()
        slots = window_slots(first, batch.draft_page_table, num_rows=num_rows, page_size=PAGE_SIZE)
        rows = self._chains.behind(first, num_rows, batch.max_committed_len + self._path_len)
        return self._forward(token_ids, positions, slots, batch, rows, last_rows)

    def lane_rows(
        self,
        step: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        lanes: TreeDraftInputs,
        batch: RoundBatch,
    ) -> torch.Tensor:
        """See `ports.DraftModel.lane_rows`; `hidden` is not looked at."""
        size = token_ids.shape[0]
        rows = TreeCascadeRows(
            prefix_lens=lanes.frontier[:size],
            mask=lanes.lane_mask[:size],
            window=lanes.window,
            max_prefix_len=batch.max_committed_len,
        )
        return self._forward(token_ids, lanes.positions(step, size), lanes.slots(step, size), batch, rows)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: RoundBatch,
        rows: TreeCascadeRows,
        logit_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        forward = ForwardBatch(
            token_ids=token_ids.reshape(-1).long(),
            positions=positions.reshape(-1),
            write_slots=(slots.reshape(-1),),
            page_tables=(batch.draft_page_table,),
            attention=TreeAttention(self._cascade, rows),
            logit_rows=logit_rows,
        )
        return self._runner.forward(forward, self._cache).view(token_ids.shape[0], -1, self.vocab_size)

    def _prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Give each slot the K/V of a sequence, as far as it does not have them."""
        todo: list[Segment] = []
        for slot, tokens in zip(slots, prompts, strict=True):
            kept = _num_common(self._seen[slot], tokens)
            # No more is sure until all is done: a forward may fail.
            self._seen[slot] = self._seen[slot][:kept]
            for start in range(kept, len(tokens), _PREFILL_ROWS):
                part = tuple(tokens[start : start + _PREFILL_ROWS])
                todo.append(Segment(slot, 0, start, part, (), is_last=False))
        while todo:
            chunk, row = [], 0
            while todo and row + todo[0].length <= _PREFILL_ROWS:
                segment = replace(todo.pop(0), row=row)
                chunk.append(segment)
                row += segment.length
            self._prefill_rows(chunk)

    def _prefill_rows(self, segments: Sequence[Segment]) -> None:
        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self._device)

        tables = self._group.page_table[tensor([s.slot for s in segments])]
        owner = tensor([index for index, s in enumerate(segments) for _ in s.token_ids])
        positions = tensor([position for s in segments for position in range(s.start, s.end)])
        pages = tables[owner, positions // PAGE_SIZE]
        forward = ForwardBatch(
            token_ids=tensor([token for s in segments for token in s.token_ids]),
            positions=positions,
            write_slots=(pages * PAGE_SIZE + (positions % PAGE_SIZE).int(),),
            page_tables=(tables,),
            attention=PrefillAttention(segments, self._device),
            logit_rows=positions.new_empty(0),
        )
        self._runner.forward(forward, self._cache)

    def _cache_group(self, num_slots: int, dtype: torch.dtype) -> CacheGroup:
        """Pages for every slot's longest sequence, once and for all."""
        max_pages = -(-self._extent // PAGE_SIZE)
        group = CacheGroup(
            GroupSpec("draft", target_layer_specs(self._runner.config)),
            num_pages=num_slots * max_pages + 1,
            page_size=PAGE_SIZE,
            num_slots=num_slots,
            max_pages=max_pages,
            dtype=dtype,
            device=self._device,
        )
        for slot in range(num_slots):
            group.reserve(slot, self._extent)
        return group

    def _leaf(self, num_slots: int, num_nodes: int, dtype: torch.dtype) -> TritonLeaf | ReferenceLeaf:
        layer = next(iter(target_layer_specs(self._runner.config).values()))
        shape = LeafShape(
            num_heads=self._runner.config.num_attention_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            page_size=PAGE_SIZE,
            dtype=dtype,
            kv_dtype=dtype,
            max_batch=num_slots,
            max_rows=num_nodes,
        )
        kernel = TritonLeaf(self._device, shape)
        runs = self._device.type == "cuda" and isinstance(kernel.tree_support().verify, Supported)
        return kernel if runs else ReferenceLeaf(shape=shape)


def layer_problems(config: Any) -> list[Problem]:
    """Why a model's layers cannot draft: attention other than full, over separate K and V.

    Raises:
        UnsupportedError: the engine itself cannot run them.
    """
    layers = target_layer_specs(config).values()
    asked = (
        ("kv_lora_rank", any(layer.value_dim is not None for layer in layers), "latent attention"),
        ("sliding_window", any(o.sliding_window for o in layer_options(config)), "sliding windows"),
        ("sinks", any(o.sinks for o in layer_options(config)), "attention sinks"),
    )
    return [
        Problem(f"draft_model: {option}", "set", f"a draft model has no {what} here", "Use another model.")
        for option, found, what in asked
        if found
    ]


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    if list(a[:length]) == list(b[:length]):
        return length
    return next(index for index in range(length) if a[index] != b[index])
