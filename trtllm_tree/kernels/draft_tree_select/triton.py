"""Triton kernel of `draft_tree_select`: one launch, one program a request, no workspace.

Nodes are first numbered by rank (root 0, then best first), where a parent always precedes its children. The
depth-first successor of a node is its first child or, without one, the next sibling of the nearest of itself
and its ancestors that has one; pointer jumping along the successors gives each node's distance from the last.
It must not rely on the entries being a tree.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton

_NUM_WARPS = 4


@triton.jit
def _item_keys(scores_ptr, item, num_entries, BLOCK_E: tl.constexpr):
    """Distinct int64 keys that order items by score, then by lower index; NaN is -inf, and -0.0 is 0.0.

    Item 0 is the root, better than any entry; item e + 1 is entry e; the rest is padding and loses every tie.
    """
    score = tl.load(scores_ptr + item - 1, mask=(item >= 1) & (item <= num_entries), other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    # Negative floats order backwards as integers: flip all but their sign.
    ordered = tl.where(item == 0, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return ordered.to(tl.int64) * BLOCK_E + (BLOCK_E - 1 - item)


@triton.jit
def _kth_largest(keys, k, KEY_BITS: tl.constexpr):
    """The k-th largest of distinct keys of KEY_BITS bits, sign included: bit by bit, from the sign down."""
    kth = tl.where(tl.sum((keys >= 0).to(tl.int32), axis=0) >= k, 0, -1).to(tl.int64) << (KEY_BITS - 1)
    for i in range(1, KEY_BITS):
        higher = kth | (tl.full([], 1, tl.int64) << (KEY_BITS - 1 - i))
        kth = tl.where(tl.sum((keys >= higher).to(tl.int32), axis=0) >= k, higher, kth)
    return kth


@triton.jit
def _parent_ranks(
    entries_ptr, parent_entry, NUM_NODES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Y: tl.constexpr
):
    """Rank of each rank's parent, given the entries in rank order (the root's is -1).

    A parent that ranks before its child is found once; anything else leaves 0, the root.
    """
    x = tl.arange(0, BLOCK_N)
    parent = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, NUM_NODES, BLOCK_Y):
        y = start + tl.arange(0, BLOCK_Y)
        entry = tl.load(entries_ptr + y, mask=y < NUM_NODES, other=-2)
        is_parent = (entry[:, None] == parent_entry[None, :]) & (y[:, None] < x[None, :])
        parent += tl.sum(tl.where(is_parent, y[:, None], 0), axis=0)
    return tl.where((x >= 1) & (x < NUM_NODES), parent, -1)


@triton.jit
def _preorder(
    parents_ptr,
    parent,
    NUM_NODES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Depth-first position of each rank, given its parent twice: in memory and as a tensor.

    BLOCK_N stands for "none".
    """
    x = tl.arange(0, BLOCK_N)
    child = tl.full([BLOCK_N], BLOCK_N, tl.int32)
    sibling = tl.full([BLOCK_N], BLOCK_N, tl.int32)
    for start in range(0, NUM_NODES, BLOCK_Y):
        y = start + tl.arange(0, BLOCK_Y)
        y_parent = tl.load(parents_ptr + y, mask=y < NUM_NODES, other=-1)[:, None]
        is_child = (y_parent == x[None, :]) & (y_parent >= 0)
        is_sibling = (y_parent == parent[None, :]) & (y_parent >= 0) & (y[:, None] > x[None, :])
        child = tl.minimum(child, tl.min(tl.where(is_child, y[:, None], BLOCK_N), axis=0))
        sibling = tl.minimum(sibling, tl.min(tl.where(is_sibling, y[:, None], BLOCK_N), axis=0))

    up = tl.where((sibling < BLOCK_N) | (parent < 0), x, parent)
    for _ in tl.static_range(ROUNDS):
        up = tl.gather(up, up, 0)
    successor = tl.where(child < BLOCK_N, child, tl.gather(sibling, up, 0))

    is_last = successor == BLOCK_N
    behind = 1 - is_last.to(tl.int32)
    jump = tl.where(is_last, x, successor)
    for _ in tl.static_range(ROUNDS):
        behind += tl.gather(behind, jump, 0)
        jump = tl.gather(jump, jump, 0)
    return NUM_NODES - 1 - behind


@triton.jit
def draft_tree_select_kernel(
    entry_scores_ptr,
    entry_tokens_ptr,
    entry_parents_ptr,
    root_tokens_ptr,
    tokens_ptr,
    parents_ptr,
    node_scores_ptr,
    slots_ptr,
    future_tokens_ptr,
    future_parents_ptr,
    entry_scores_stride_b,
    entry_tokens_stride_b,
    entry_parents_stride_b,
    root_tokens_stride_b,
    tokens_stride_b,
    parents_stride_b,
    node_scores_stride_b,
    future_tokens_stride_s,
    future_parents_stride_s,
    num_entries,
    PUBLISHES: tl.constexpr,
    NUM_NODES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    KEY_BITS: tl.constexpr,
    LOWEST_KEY: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    entry_scores_ptr += b * entry_scores_stride_b
    tokens_ptr += b * tokens_stride_b
    parents_ptr += b * parents_stride_b
    rank = tl.arange(0, BLOCK_N)
    is_node = rank < NUM_NODES
    is_kept_entry = is_node & (rank >= 1)

    # The best N items, packed through memory and then sorted. The rows of `tokens` and `parents` serve as
    # scratch until their contents are stored.
    item = tl.arange(0, BLOCK_E)
    keys = _item_keys(entry_scores_ptr, item, num_entries, BLOCK_E)
    kept = keys >= _kth_largest(keys, NUM_NODES, KEY_BITS)
    tl.store(tokens_ptr + tl.cumsum(kept.to(tl.int32), axis=0) - 1, item, mask=kept)
    tl.debug_barrier()
    item = tl.load(tokens_ptr + rank, mask=is_node, other=0)
    keys = _item_keys(entry_scores_ptr, item, num_entries, BLOCK_E)
    keys = tl.sort(tl.where(is_node, keys, LOWEST_KEY), descending=True)
    entry = BLOCK_E - 2 - (keys & (BLOCK_E - 1)).to(tl.int32)

    parent_entry = tl.load(
        entry_parents_ptr + b * entry_parents_stride_b + entry, mask=is_kept_entry, other=-1
    )
    token = tl.load(entry_tokens_ptr + b * entry_tokens_stride_b + entry, mask=is_kept_entry, other=0)
    score = tl.load(entry_scores_ptr + entry, mask=is_kept_entry, other=0.0)
    root_token = tl.load(root_tokens_ptr + b * root_tokens_stride_b)

    tl.debug_barrier()
    tl.store(tokens_ptr + rank, entry, mask=is_node)
    tl.debug_barrier()
    parent = _parent_ranks(tokens_ptr, parent_entry, NUM_NODES, BLOCK_N, BLOCK_Y)
    tl.store(parents_ptr + rank, parent, mask=is_node)
    tl.debug_barrier()
    position = _preorder(parents_ptr, parent, NUM_NODES, BLOCK_N, BLOCK_Y, ROUNDS)
    tl.debug_barrier()

    parent = tl.where(rank == 0, -1, tl.gather(position, tl.maximum(parent, 0), 0))
    score = tl.where(score == score, score, float("-inf"))
    token = tl.where(rank == 0, root_token, token)
    tl.store(tokens_ptr + position, token, mask=is_node)
    tl.store(parents_ptr + position, parent, mask=is_node)
    tl.store(node_scores_ptr + b * node_scores_stride_b + position, score, mask=is_node)
    if PUBLISHES:
        slot = tl.load(slots_ptr + b)
        tl.store(future_tokens_ptr + slot * future_tokens_stride_s + position, token, mask=is_node)
        tl.store(future_parents_ptr + slot * future_parents_stride_s + position, parent, mask=is_node)


def _constexprs(num_nodes: int, num_entries: int, *, publishes: bool) -> dict[str, object]:
    # tl.sort needs two elements at least.
    block_e = max(2, triton.next_power_of_2(num_entries + 1))
    block_n = max(2, triton.next_power_of_2(num_nodes))
    key_bits = 31 + block_e.bit_length()
    return {
        "PUBLISHES": publishes,
        "NUM_NODES": num_nodes,
        "BLOCK_E": block_e,
        "BLOCK_N": block_n,
        # Pairs of nodes are looked at in tiles of 2048.
        "BLOCK_Y": min(block_n, 2048 // block_n),
        "KEY_BITS": key_bits,
        "LOWEST_KEY": -(1 << (key_bits - 1)),
        "ROUNDS": (num_nodes - 1).bit_length(),
    }


def launch(
    entry_scores: torch.Tensor,
    entry_tokens: torch.Tensor,
    entry_parents: torch.Tensor,
    root_tokens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    node_scores: torch.Tensor,
    slots: torch.Tensor | None,
    future_tokens: torch.Tensor | None,
    future_parents: torch.Tensor | None,
) -> None:
    """Launch the kernel; arguments as in the op."""
    num_requests, num_nodes = tokens.shape
    num_entries = entry_scores.shape[1]
    if num_requests == 0:
        return
    tensors = (entry_scores, entry_tokens, entry_parents, root_tokens, tokens, parents, node_scores)
    draft_tree_select_kernel[(num_requests,)](
        *tensors,
        slots,
        future_tokens,
        future_parents,
        *(tensor.stride(0) for tensor in tensors),
        *(0 if tensor is None else tensor.stride(0) for tensor in (future_tokens, future_parents)),
        num_entries,
        **_constexprs(num_nodes, num_entries, publishes=slots is not None),
        num_warps=_NUM_WARPS,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test, up to the largest tree."""
    signature = dict.fromkeys((name for name in draft_tree_select_kernel.arg_names if name.islower()), "i32")
    signature |= {name: "*i32:16" for name in signature if name.endswith("_ptr")}
    signature |= dict.fromkeys(("entry_scores_ptr", "node_scores_ptr"), "*fp32:16")
    signature["slots_ptr"] = "*i64:16"
    return [
        (
            draft_tree_select_kernel,
            signature,
            _constexprs(num_nodes, num_entries, publishes=publishes),
            {"num_warps": _NUM_WARPS},
        )
        for num_nodes, num_entries, publishes in (
            (16, 52, True),
            (64, 69, False),
            (64, 600, True),
            (256, 2320, True),
        )
    ]
