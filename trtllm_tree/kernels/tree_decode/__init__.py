"""Op `tree_decode`: attention of every row over its whole prefix and its masked window, in one pass.

Owns the contract, the checks and the dispatch. It must not know what the rows are (verify nodes or draft
lanes) or how the mask came about.

Legend: B requests, R rows, W window, Hq/Hkv query and KV heads, D head dim, Dv value channels.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.dispatch import use_triton

_QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tree_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    *,
    window: int,
    scale: float,
    fp8_query: bool = False,
    value_dim: int | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of every row over keys [0, P) and the window keys that its mask names.

    With P = prefix_lens[b], window column j is the key at position P + j; row r sees it iff bit j of
    mask[b, r] is set. A row that sees nothing gives 0. Slots that no row of a request sees may hold
    anything, NaN and infinity included.

    Args:
        q: [B, R, Hq, D] float32, bfloat16 or float16.
        k_cache: [num_pages, Hkv, page_size, D], any strides; q's dtype, or float8_e4m3fn (unscaled) under a
            16-bit q, which is then rounded to float16 (exact but for magnitudes below 2^-14, and limited
            to 65504). Query head h reads KV head h // (Hq / Hkv).
        v_cache: as k_cache; its strides may differ. None means MLA: k_cache [num_pages, 1, page_size, D] holds
            latent rows, whose leading `value_dim` channels are the value too, and q is the absorbed query.
        page_table: int32 [B, max_pages]. A position beyond it, and an entry < 0, mean the dummy page 0.
        prefix_lens: int32 [B], keys before the window.
        mask: int64 [B, R, ceil(W / 64)], bits at and above W are ignored.
        window: W, keys in the window, >= 1.
        scale: multiplies q . k, > 0.
        fp8_query: round q to float8_e4m3fn (saturating, unscaled) and multiply it with K in FP8; faster, and
            the rounding of q shows in the output. Needs a float8_e4m3fn cache, and not MLA.
        value_dim: Dv <= D of a latent cache (kv_lora_rank); None otherwise, where Dv = D.
        out: [B, R, Hq, Dv] in q's dtype; allocated if None.
        workspace: float32, contiguous, at least `workspace_shape` elements; allocated if None. Scratch:
            nothing in it outlives the call.

    Returns:
        `out`. The last dimension of every tensor is contiguous. Allocates nothing and never syncs when `out`
        and `workspace` are given on a GPU; the launches depend on shapes only, never on lengths.

    Source: seed, "One tree attention"; split-KV with a merge of partial softmaxes is Milakov and
    Gimelshein 2018.
    """
    assert (v_cache is None) == (value_dim is not None), "value_dim belongs to a latent cache, and only to it"
    if out is None:
        out = torch.empty(*q.shape[:3], value_dim or q.shape[3], dtype=q.dtype, device=q.device)
    _check(q, k_cache, v_cache, page_table, prefix_lens, mask, window, scale, fp8_query, out)
    assert out.shape[3] == (value_dim or q.shape[3]), "out has another value dim"
    rows = (page_table, prefix_lens, mask)
    options = {"window": window, "scale": scale, "out": out}
    if not use_triton(q):
        from trtllm_tree.kernels.tree_decode.reference import reference

        reference(q, k_cache, v_cache, *rows, fp8_query=fp8_query, **options)
        return out
    if workspace is None:
        shape = workspace_shape(q, k_cache, value_dim)
        workspace = torch.empty(shape, dtype=torch.float32, device=q.device)
    if v_cache is None:
        from trtllm_tree.kernels.tree_decode.mla import launch as launch_latent

        launch_latent(q, k_cache, *rows, workspace=workspace, **options)
    else:
        from trtllm_tree.kernels.tree_decode.triton import launch

        launch(q, k_cache, v_cache, *rows, workspace=workspace, fp8_query=fp8_query, **options)
    return out


def workspace_shape(
    q: torch.Tensor, k_cache: torch.Tensor, value_dim: int | None = None
) -> tuple[int, int, int]:
    """Shape of the float32 scratch of one call: (splits, B * R * Hq, Dv + 4); (0, 0, 0) when none is used.

    It depends on the shapes and dtypes of `q` and `k_cache`, on `value_dim` (MLA) and on the GPU, not on lengths.
    One buffer with the largest number of elements serves every call on the same stream.
    """
    if not use_triton(q):
        return (0, 0, 0)
    if value_dim is not None:
        from trtllm_tree.kernels.tree_decode.mla import partials_shape as latent_partials_shape

        return latent_partials_shape(q, k_cache, value_dim)
    from trtllm_tree.kernels.tree_decode.tiles import partials_shape

    return partials_shape(q, k_cache)


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    window: int,
    scale: float,
    fp8_query: bool,
    out: torch.Tensor,
) -> None:
    batch, num_rows, num_heads, head_dim = q.shape
    assert q.dtype in _QUERY_DTYPES, f"q is {q.dtype}"
    fp8 = k_cache.dtype == torch.float8_e4m3fn and q.dtype != torch.float32
    assert k_cache.dtype == q.dtype or fp8, f"{k_cache.dtype} keys under a {q.dtype} query"
    assert fp8 or not fp8_query, "fp8_query needs a float8_e4m3fn cache"
    if v_cache is None:
        assert k_cache.shape[1] == 1, "a latent cache has one head"
        assert out.shape[3] <= head_dim, "more value channels than a latent row has"
        assert not fp8_query, "a latent cache takes the exact query only"
    else:
        assert k_cache.dtype == v_cache.dtype, "K and V differ in dtype"
        assert k_cache.shape == v_cache.shape, "K and V differ in shape"
    assert k_cache.shape[3] == head_dim, "K and q differ in head dim"
    assert num_heads % k_cache.shape[1] == 0, "query heads must be a multiple of KV heads"
    assert page_table.dtype == torch.int32, "page_table must be int32"
    assert page_table.dim() == 2, "page_table must be [B, max_pages]"
    assert page_table.shape[0] == batch, "page_table has another batch"
    assert prefix_lens.dtype == torch.int32, "prefix_lens must be int32"
    assert prefix_lens.shape == (batch,), "prefix_lens must be [B]"
    assert window >= 1, "an empty window"
    assert scale > 0, "scale must be positive"
    assert mask.dtype == torch.int64, "mask must be int64"
    assert mask.shape == (batch, num_rows, -(-window // 64)), "mask must be [B, R, ceil(W / 64)]"
    assert out.shape[:3] == q.shape[:3], "q and out differ in shape"
    assert out.dtype == q.dtype, "out must have q's dtype"
    for tensor in (q, k_cache, k_cache if v_cache is None else v_cache, page_table, prefix_lens, mask, out):
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, "the last dimension must be contiguous"
