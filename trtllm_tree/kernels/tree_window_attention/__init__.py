"""Op `tree_window_attention`: the masked verify or lane window, merged with the prefix partial.

Owns the contract, the checks and the dispatch. It must not know what the rows are (verify nodes or draft
lanes), how the mask came about, or which leaf computed the partial.

Legend: B requests, R rows, W window, Hq/Hkv query and KV heads, D head dim; for MLA Dqk channels of a latent row, Dv
of which are its value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtllm_tree.kernels.dispatch import use_triton

_QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tree_window_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse2: torch.Tensor,
    *,
    window: int,
    causal_prefix: bool,
    scale: float,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of every row over its prefix, whose partial is given, and its masked window.

    With P = prefix_lens[b], window column j is the key at position P + j; row r sees it iff bit j of
    mask[b, r] is set. The rest of what row r sees is the prefix, keys [0, P). Its partial covers
    `causal_prefix=False`: all of it; `causal_prefix=True`: keys [0, P - R + 1 + r), as a causal decode of
    R rows over P keys does, and the tail up to P is attended here. A partial over no key is told by that
    count, and then prefix_out and prefix_lse2 are never read. A row that sees nothing at all gives 0.

    `sinks` adds to the softmax of every row of head h one key with the score sinks[h] and the value 0: what it
    takes goes nowhere. It is added here, once, so no partial may hold it already.

    Slots that no row of a request sees may hold anything, NaN and infinity included.

    `v_cache=None` means MLA: `k_cache` is a latent cache with Hkv = 1, `q` the absorbed query with its rotary
    channels behind. The leading Dv channels of a latent row are the key's latent part and the value, the other
    Dqk - Dv >= 0 the key's rotary part; a kernel reads each row once. D below is Dqk of `q` and `k_cache`, and Dv
    of `prefix_out` and `out`.

    Args:
        q: [B, R, Hq, D] float32, bfloat16 or float16.
        k_cache: [num_pages, Hkv, page_size, D], any strides; q's dtype, or float8_e4m3fn (unscaled) under a
            16-bit q (in the torch reference under any q). Query head h reads KV head h // (Hq / Hkv).
        v_cache: as k_cache, its strides may differ; None if k_cache holds latent rows.
        page_table: int32 [B, max_pages]. A position beyond it, and an entry < 0, mean the dummy page 0.
        prefix_lens: int32 [B], keys before the window.
        mask: int64 [B, R, ceil(W / 64)], bits at and above W are ignored.
        prefix_out: [B, R, Hq, D] q's dtype or float32, the partial's normalised output.
        prefix_lse2: float32 [B, R, Hq], log2 of the partial's sum of exp(scale * q . k).
        window: W, keys in the window, >= 1.
        causal_prefix: what the partial covers, see above.
        scale: multiplies q . k.
        sinks: float32 [Hq], natural logarithms like scale * q . k, unscaled; None without. Not for MLA.
        out: [B, R, Hq, D] in q's dtype, may be prefix_out itself; allocated if None.

    Returns:
        `out`. The last dimension of every tensor is contiguous. Allocates nothing and never syncs when `out`
        is given on a GPU.

    Source: seed, "One tree attention"; the merge of partial softmaxes is Milakov and Gimelshein 2018.
    """
    if out is None:
        out = torch.empty(prefix_out.shape, dtype=q.dtype, device=q.device)
    _check(q, k_cache, v_cache, page_table, prefix_lens, mask, prefix_out, prefix_lse2, window, out)
    extra: dict[str, torch.Tensor] = {}
    if sinks is not None:
        assert v_cache is not None, "sinks over a latent cache"
        assert sinks.dtype == torch.float32, "sinks must be float32"
        assert sinks.shape == q.shape[2:3], "sinks must be [Hq]"
        extra["sinks"] = sinks
    # The kernels differ in whether `v_cache` may be None.
    run: Callable[..., None]
    if not use_triton(q):
        from trtllm_tree.kernels.tree_window_attention.reference import reference

        run = reference
    elif v_cache is None:
        from trtllm_tree.kernels.tree_window_attention import mla

        run = mla.launch
    else:
        from trtllm_tree.kernels.tree_window_attention import triton

        run = triton.launch
    run(
        q,
        k_cache,
        v_cache,
        page_table,
        prefix_lens,
        mask,
        prefix_out,
        prefix_lse2,
        window=window,
        causal_prefix=causal_prefix,
        scale=scale,
        out=out,
        **extra,
    )
    return out


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse2: torch.Tensor,
    window: int,
    out: torch.Tensor,
) -> None:
    batch, num_rows, num_heads, head_dim = q.shape
    assert q.dtype in _QUERY_DTYPES, f"q is {q.dtype}"
    fp8 = k_cache.dtype == torch.float8_e4m3fn and (q.dtype != torch.float32 or not use_triton(q))
    assert k_cache.dtype == q.dtype or fp8, f"{k_cache.dtype} keys under a {q.dtype} query"
    assert k_cache.shape[3] == head_dim, "K and q differ in head dim"
    if v_cache is None:
        assert k_cache.shape[1] == 1, "a latent cache has one head"
        assert prefix_out.shape[3] <= head_dim, "more value channels than a latent row has"
    else:
        assert k_cache.dtype == v_cache.dtype, "K and V differ in dtype"
        assert k_cache.shape == v_cache.shape, "K and V differ in shape"
        assert num_heads % k_cache.shape[1] == 0, "query heads must be a multiple of KV heads"
        assert prefix_out.shape[3] == head_dim, "prefix_out and q differ in head dim"
    assert page_table.dtype == torch.int32, "page_table must be int32"
    assert page_table.dim() == 2, "page_table must be [B, max_pages]"
    assert page_table.shape[0] == batch, "page_table has another batch"
    assert prefix_lens.dtype == torch.int32, "prefix_lens must be int32"
    assert prefix_lens.shape == (batch,), "prefix_lens must be [B]"
    assert window >= 1, "an empty window"
    assert mask.dtype == torch.int64, "mask must be int64"
    assert mask.shape == (batch, num_rows, -(-window // 64)), "mask must be [B, R, ceil(W / 64)]"
    assert prefix_out.dtype in (q.dtype, torch.float32), f"prefix_out is {prefix_out.dtype}"
    assert prefix_out.shape[:3] == q.shape[:3], "prefix_out must be [B, R, Hq, ...]"
    assert out.shape == prefix_out.shape, "prefix_out and out differ in shape"
    assert prefix_lse2.dtype == torch.float32, "prefix_lse2 must be float32"
    assert prefix_lse2.shape == q.shape[:3], "prefix_lse2 must be [B, R, Hq]"
    assert out.dtype == q.dtype, "out must have q's dtype"
    caches = (k_cache,) if v_cache is None else (k_cache, v_cache)
    for tensor in (q, *caches, page_table, prefix_lens, mask, prefix_out, prefix_lse2, out):
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, "the last dimension must be contiguous"
