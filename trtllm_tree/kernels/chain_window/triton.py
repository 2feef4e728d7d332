"""Triton kernel of `chain_window`: one program a request."""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton


@triton.jit
def chain_window_kernel(
    token_map_ptr,
    slots_ptr,
    committed_lens_ptr,
    tokens_ptr,
    positions_ptr,
    token_map_stride_s,
    tokens_stride_b,
    positions_stride_b,
    num_nodes,
    BLOCK_N: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_N)
    live = node < num_nodes
    slot = tl.load(slots_ptr + b)
    token = tl.load(token_map_ptr + slot * token_map_stride_s + node, mask=live, other=0)
    tl.store(tokens_ptr + b * tokens_stride_b + node, token, mask=live)
    position = tl.load(committed_lens_ptr + b).to(tl.int64) + node
    tl.store(positions_ptr + b * positions_stride_b + node, position, mask=live)


def launch(
    token_map: torch.Tensor,
    slots: torch.Tensor,
    committed_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Launch the kernel; arguments as in the op."""
    batch, num_nodes = tokens.shape
    if batch == 0:
        return
    chain_window_kernel[(batch,)](
        token_map,
        slots,
        committed_lens,
        tokens,
        positions,
        token_map.stride(0),
        tokens.stride(0),
        positions.stride(0),
        num_nodes,
        BLOCK_N=triton.next_power_of_2(num_nodes),
        num_warps=1,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    signature = dict.fromkeys((name for name in chain_window_kernel.arg_names if name.islower()), "i32")
    signature |= dict.fromkeys(("token_map_ptr", "committed_lens_ptr", "tokens_ptr"), "*i32:16")
    signature |= dict.fromkeys(("slots_ptr", "positions_ptr"), "*i64:16")
    return [(chain_window_kernel, signature, {"BLOCK_N": block_n}, {"num_warps": 1}) for block_n in (32, 128)]
