"""Op `rotate_append`: rotates the queries and keys of some rows, and puts the rows' K and V into a paged cache.

Owns the contract, the checks and the dispatch. It must not know what the rows are, nor who allocates pages.

Legend: T rows, Hq/Hkv query and KV heads, D head dim, F rotary frequencies (half of the rotary channels).
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton


def rotate_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos_sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write row t's k (rotated) and v to slot slots[t], and return its q (rotated).

    Frequency f turns the channels (f, F + f), or (2 f, 2 f + 1) if `interleaved`, by the angle of positions[t]; the
    channels from 2 F on stay. Computed in float32 and rounded to q's dtype, then to the cache's: float8_e4m3fn
    unscaled and saturating.

    Args:
        q: [T, Hq, D] float32, bfloat16 or float16.
        k: [T, Hkv, D] in q's dtype, as is `v`; rows and heads of all three may have any strides.
        k_cache: [num_pages, Hkv, page_size, D] in q's dtype or float8_e4m3fn, of any strides; mutated, as is `v_cache`.
        slots: int32 [T], page * page_size + offset; a row with a slot < 0 is stored nowhere. The others differ.
        cos_sin: float32 [P, F, 2] contiguous; None rotates nothing, and q is copied.
        positions: int64 [T], needed with `cos_sin`; one outside of [0, P) means the nearest end.
        q_out: [T, Hq, D] in q's dtype; allocated if None.

    Returns:
        `q_out`. The last dimension of every tensor is contiguous. One launch, which never syncs.

    Source: RoFormer, arXiv 2104.09864; seed, "Position follows depth, slot follows node index".
    """
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if q_out is None else q_out
    _check(q, k, v, k_cache, v_cache, slots, cos_sin, positions, q_out)
    if use_triton(q):
        from trtllm_tree.kernels.rotate_append.triton import launch as run
    else:
        from trtllm_tree.kernels.rotate_append.reference import reference as run
    run(
        q,
        k,
        v,
        k_cache,
        v_cache,
        slots,
        cos_sin=cos_sin,
        positions=positions,
        interleaved=interleaved,
        q_out=q_out,
    )
    return q_out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    q_out: torch.Tensor,
) -> None:
    rows, _, head_dim = q.shape
    assert q.dtype in (torch.float32, torch.bfloat16, torch.float16), f"q is {q.dtype}"
    assert k.shape == v.shape == (rows, k_cache.shape[1], head_dim), "k or v does not fit q and the cache"
    assert k.dtype == v.dtype == q_out.dtype == q.dtype, "q, k, v and q_out differ in dtype"
    assert k_cache.dtype in (q.dtype, torch.float8_e4m3fn), f"{k_cache.dtype} cache under {q.dtype}"
    assert (v_cache.dtype, v_cache.shape) == (k_cache.dtype, k_cache.shape), "K and V caches differ"
    assert k_cache.shape[3] == head_dim, "the cache has another head dim"
    assert q_out.shape == q.shape, "q_out has another shape"
    assert slots.dtype == torch.int32, "slots must be int32"
    assert slots.shape == (rows,), "slots must be [T]"
    if cos_sin is not None:
        assert positions is not None, "a rotation needs positions"
        assert positions.dtype == torch.int64, "positions must be int64"
        assert positions.shape == (rows,), "positions must be [T]"
        assert cos_sin.dtype == torch.float32, "cos_sin must be float32"
        assert cos_sin.is_contiguous(), "cos_sin must be contiguous"
        assert cos_sin.shape[2] == 2, "cos_sin must be [P, F, 2]"
        assert 2 * cos_sin.shape[1] <= head_dim, "more rotary channels than channels"
    for tensor in (q, k, v, k_cache, v_cache, q_out):
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
