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
    slots_ptr,
    loaded_parents_ptr,
    positions_ptr,
    shift_ptr,
    parents_stride_b,
    depths_stride_b,
    mask_stride_b,
    mask_stride_n,
    loaded_parents_stride_b,
    positions_stride_b,
    shift_stride_b,
    num_nodes,
    LOADS_STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    node = tl.arange(0, BLOCK_N)
    live = node < num_nodes
    tree = tl.load(slots_ptr + b) if LOADS_STEP else b
    parent = tl.load(parents_ptr + tree * parents_stride_b + node, mask=live, other=-1)
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
        if LOADS_STEP:
            tl.store(loaded_parents_ptr + b * loaded_parents_stride_b + node, parent, mask=live)
            shift = (depth - node).to(tl.int64)
            tl.store(shift_ptr + b * shift_stride_b + node, shift, mask=live)
            positions_ptr += b * positions_stride_b
            position = tl.load(positions_ptr + node, mask=live, other=0) + shift
            tl.store(positions_ptr + node, position, mask=live)


def _constexprs(num_nodes: int, *, loads_step: bool) -> dict[str, object]:
    # A warp's worth of nodes at least: fewer would not be faster.
    block_n = max(32, triton.next_power_of_2(num_nodes))
    return {"LOADS_STEP": loads_step, "BLOCK_N": block_n, "ROUNDS": (num_nodes - 1).bit_length()}


def launch(
    parents: torch.Tensor,
    *,
    depths: torch.Tensor,
    ancestor_mask: torch.Tensor,
    slots: torch.Tensor | None = None,
    loaded_parents: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> None:
    """Launch the kernel; arguments as in the op."""
    num_requests, num_nodes, words = ancestor_mask.shape
    if num_requests == 0:
        return
    tree_ancestors_kernel[(num_requests, words)](
        parents,
        depths,
        ancestor_mask,
        slots,
        loaded_parents,
        positions,
        shift,
        parents.stride(0),
        depths.stride(0),
        *ancestor_mask.stride()[:2],
        *(0 if tensor is None else tensor.stride(0) for tensor in (loaded_parents, positions, shift)),
        num_nodes,
        **_constexprs(num_nodes, loads_step=slots is not None),
        num_warps=_NUM_WARPS,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    signature = dict.fromkeys((name for name in tree_ancestors_kernel.arg_names if name.islower()), "i32")
    signature |= dict.fromkeys(("parents_ptr", "depths_ptr", "loaded_parents_ptr"), "*i32:16")
    signature |= dict.fromkeys(("mask_ptr", "slots_ptr", "positions_ptr", "shift_ptr"), "*i64:16")
    return [
        (
            tree_ancestors_kernel,
            signature,
            _constexprs(num_nodes, loads_step=loads_step),
            {"num_warps": _NUM_WARPS},
        )
        for num_nodes, loads_step in ((16, False), (64, True), (256, True))
    ]
