"""Triton kernel of `tree_ancestors`: pointer jumping, one program a request and mask word.

It must not rely on the parents being a tree.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton

_NUM_WARPS = 2


@triton.jit
def tree_ancestors_kernel(
    parents_ptr,
    depths_ptr,
    mask_ptr,
    parents_stride_b,
    depths_stride_b,
    mask_stride_b,
    mask_stride_n,
    num_nodes,
    BLOCK_N: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    node = tl.arange(0, BLOCK_N)
    live = node < num_nodes
    parent = tl.load(parents_ptr + b * parents_stride_b + node, mask=live, other=-1)
    has_parent = (parent >= 0) & (parent < node)

    # After round k, `jump` is 2**k parents up and `depth` and `bits` cover the way to it. At a root the jump
    # stays: it adds depth 0 and a bit that is already set.
    jump = tl.where(has_parent, parent, node)
    depth = has_parent.to(tl.int32)
    own = tl.full([BLOCK_N], 1, tl.int64) << (node % 64).to(tl.int64)
    bits = tl.where(node // 64 == word, own, 0)
    for _ in tl.static_range(ROUNDS):
        depth += tl.gather(depth, jump, 0)
        bits |= tl.gather(bits, jump, 0)
        jump = tl.gather(jump, jump, 0)

    tl.store(mask_ptr + b * mask_stride_b + node.to(tl.int64) * mask_stride_n + word, bits, mask=live)
    if word == 0:
        tl.store(depths_ptr + b * depths_stride_b + node, depth, mask=live)


def _constexprs(num_nodes: int) -> dict[str, object]:
    # A warp's worth of nodes at least: fewer would not be faster.
    block_n = max(32, triton.next_power_of_2(num_nodes))
    return {"BLOCK_N": block_n, "ROUNDS": (num_nodes - 1).bit_length()}


def launch(parents: torch.Tensor, *, depths: torch.Tensor, ancestor_mask: torch.Tensor) -> None:
    """Launch the kernel; arguments as in the op."""
    num_requests, num_nodes, words = ancestor_mask.shape
    if num_requests == 0:
        return
    tree_ancestors_kernel[(num_requests, words)](
        parents,
        depths,
        ancestor_mask,
        parents.stride(0),
        depths.stride(0),
        *ancestor_mask.stride()[:2],
        num_nodes,
        **_constexprs(num_nodes),
        num_warps=_NUM_WARPS,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    signature = dict.fromkeys((name for name in tree_ancestors_kernel.arg_names if name.islower()), "i32")
    signature |= {"parents_ptr": "*i32:16", "depths_ptr": "*i32:16", "mask_ptr": "*i64:16"}
    return [
        (tree_ancestors_kernel, signature, _constexprs(num_nodes), {"num_warps": _NUM_WARPS})
        for num_nodes in (16, 64, 256)
    ]
