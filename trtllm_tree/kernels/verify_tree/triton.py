"""Triton kernel of `verify_tree`: one launch, one program a request, the whole tree in registers.

It must not know how the target tokens were drawn.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton


@triton.jit
def verify_tree_kernel(
    tokens_ptr,
    parents_ptr,
    target_tokens_ptr,
    path_ptr,
    accept_len_ptr,
    predict_ptr,
    num_nodes,
    tokens_stride_b,
    parents_stride_b,
    target_tokens_stride_b,
    path_stride_b,
    predict_stride_b,
    BLOCK_NODES: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_NODES)
    valid = node < num_nodes
    tokens = tl.load(tokens_ptr + b * tokens_stride_b + node, mask=valid, other=-1)
    # -2 is nobody's child.
    parents = tl.load(parents_ptr + b * parents_stride_b + node, mask=valid, other=-2)
    targets = tl.load(target_tokens_ptr + b * target_tokens_stride_b + node, mask=valid, other=-1)

    path = tl.full([BLOCK_NODES], -1, tl.int32)
    predict = tl.full([BLOCK_NODES], -1, tl.int32)
    current = tl.program_id(0) * 0
    accept_len = current
    # A child has a higher id than its parent, so `current` grows and the loop ends.
    while current < num_nodes:
        target = tl.sum(tl.where(node == current, targets, 0))
        path = tl.where(node == accept_len, current, path)
        predict = tl.where(node == accept_len, target, predict)
        accept_len += 1
        matches = (parents == current) & (node > current) & (tokens == target) & (target >= 0)
        current = tl.min(tl.where(matches, node, num_nodes))

    tl.store(path_ptr + b * path_stride_b + node, path, mask=valid)
    tl.store(predict_ptr + b * predict_stride_b + node, predict, mask=valid)
    tl.store(accept_len_ptr + b, accept_len)


def launch(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    target_tokens: torch.Tensor,
    *,
    path: torch.Tensor,
    accept_len: torch.Tensor,
    predict: torch.Tensor,
) -> None:
    """Launch the kernel; arguments as in the op."""
    batch, num_nodes = tokens.shape
    verify_tree_kernel[(batch,)](
        tokens,
        parents,
        target_tokens,
        path,
        accept_len,
        predict,
        num_nodes,
        tokens.stride(0),
        parents.stride(0),
        target_tokens.stride(0),
        path.stride(0),
        predict.stride(0),
        BLOCK_NODES=triton.next_power_of_2(num_nodes),
        # The walk is a chain of reductions; within one warp none of them needs shared memory.
        num_warps=1,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    signature = {
        name: "*i32:16" if name.endswith("_ptr") else "i32"
        for name in verify_tree_kernel.arg_names
        if name.islower()
    }
    return [(verify_tree_kernel, signature, {"BLOCK_NODES": nodes}, {"num_warps": 1}) for nodes in (64, 256)]
