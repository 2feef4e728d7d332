"""The prompts of a step: their first tokens, the head's rows over them, and what the first trees start from.

Must not know the generation rows behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trtllm_tree.hosts.tensorrt_llm.batch import StepBatch, round_batch
from trtllm_tree.hosts.tensorrt_llm.slots import ContextRow
from trtllm_tree.hosts.tensorrt_llm.worker_parts import WorkerParts
from trtllm_tree.ports import RoundBatch

# The arguments of `SpecRound.start`.
Started = tuple[RoundBatch, torch.Tensor, torch.Tensor, torch.Tensor]


def end_prompts(
    parts: WorkerParts,
    batch: StepBatch,
    attn_metadata: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    features: torch.Tensor,
    logits: torch.Tensor,
) -> Started | None:
    """Run the head over the prompts' rows; arguments are the worker call's.

    Returns:
        What starts the requests whose prefill ended; None if none did.
    """
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
    hidden = parts.draft_model.prefill_rows(tokens, parts.draft_model.fuse(features[:num_rows]), positions)
    if len(ended) < contexts:
        # A slot whose prompt goes on may still hold what the request before left there.
        parts.round.future_input_map.index_fill_(0, slots, 0)
    if not ended:
        return None
    index = torch.tensor(ended).to(device, non_blocking=True)
    last_rows, frontier = last_rows[index], (positions[last_rows[index]] + 1).int()
    # No target rows are written.
    nowhere = frontier.new_empty(0, len(ended), parts.round.num_nodes)
    started = round_batch(parts, attn_metadata, index, frontier, nowhere)
    return started, hidden[last_rows], first[index], frontier


def _behind_prompts(first: torch.Tensor, prompts: Sequence[ContextRow]) -> torch.Tensor:
    """The token behind each prompt's rows, int32 [C]: the first drawn one, or the prompt's next where it goes on."""
    goes_on = [(row, prompt.next_token) for row, prompt in enumerate(prompts) if not prompt.is_last]
    if not goes_on:
        return first
    rows, tokens = torch.tensor(goes_on, dtype=torch.int64).t().to(first.device, non_blocking=True)
    return first.index_copy(0, rows, tokens.int())
