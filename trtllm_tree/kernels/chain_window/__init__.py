"""Op `chain_window`: the rows of the next verify window as a chain, by pool slot, in one launch.

Owns the contract, the checks and the dispatch. It must not know whether the rows will be a tree.

Legend: B requests, N rows of the window.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton


def chain_window(
    token_map: torch.Tensor,
    slots: torch.Tensor,
    committed_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """tokens[b] = token_map[slots[b]] and positions[b, i] = committed_lens[b] + i.

    Args:
        token_map: int32 [num_slots, N], rows contiguous.
        slots: int64 [B], each in 0 .. num_slots - 1; several pad rows may share one.
        committed_lens: int32 [B].
        tokens: int32 [B, N] output.
        positions: int64 [B, N] output.

    Every element of the outputs is written. Allocates nothing and never syncs on a GPU.

    Source: seed, "Next round's tree rides with next round's tokens".
    """
    batch, shape = slots.shape[0], (slots.shape[0], token_map.shape[1])
    assert slots.dtype == torch.int64 and committed_lens.dtype == torch.int32, "int64 slots, int32 lengths"
    assert slots.shape == committed_lens.shape == (batch,), "slots and committed_lens must be [B]"
    assert slots.is_contiguous() and committed_lens.is_contiguous(), "vectors must be contiguous"
    assert token_map.dtype == tokens.dtype == torch.int32, "token_map and tokens must be int32"
    assert positions.dtype == torch.int64, "positions must be int64"
    assert tokens.shape == positions.shape == shape, "tokens and positions must be [B, N]"
    for tensor in (token_map, tokens, positions):
        assert tensor.stride(1) == 1 or shape[1] == 1, "the last dimension must be contiguous"
    if use_triton(token_map):
        from trtllm_tree.kernels.chain_window.triton import launch as run
    else:
        from trtllm_tree.kernels.chain_window.reference import reference as run
    run(token_map, slots, committed_lens, tokens=tokens, positions=positions)
