"""What a worker call gives TensorRT-LLM back: a run of tokens a request and its next window, in a chain's words."""

from __future__ import annotations

import torch

from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.hosts.tensorrt_llm.worker_parts import WorkerParts


def step_results(parts: WorkerParts, size: int, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the `size` requests of a step kept, and the windows that lie in their slots now."""
    buffers = parts.buffers
    next_tokens = buffers.next_tokens[:size]
    torch.index_select(parts.round.future_input_map, 0, parts.storage.all_ids_buf[:size], out=next_tokens)
    return {
        "logits": logits,
        "new_tokens": buffers.new_tokens[:size],
        "new_tokens_lens": buffers.new_lens[:size],
        # Contiguous: a captured graph's outputs may be remembered by address and shape alone.
        "next_draft_tokens": buffers.next_drafts[:size].copy_(next_tokens[:, 1:]),
        "next_new_tokens": next_tokens,
    }


def empty_results(config: SpeculativeConfig, size: int, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """The results of a step that only measures memory."""
    tokens = logits.new_zeros(size, config.num_nodes, dtype=torch.int32)
    return {
        "logits": logits,
        "new_tokens": tokens[:, : config.num_steps + 1],
        "new_tokens_lens": logits.new_ones(size, dtype=torch.int32),
        "next_draft_tokens": tokens[:, 1:],
        "next_new_tokens": tokens,
    }
