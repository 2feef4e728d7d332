"""Op: attention of R query rows a request over its first keys in a paged cache, with the base-2 log-sum-exp.

This is the plain half of every attention here: a chain's decode and prefill, and the prefix partial of the
cascade's `reference` leaf. It has no tree mask.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels.prefix_attention.reference import prefix_attention_reference


def prefix_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    causal: bool,
    max_kv_len: int,
    scale: float,
    first_keys: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v over keys [f_r, n_r) of each request.

    f_r = `first_keys[b, r]`, or 0; n_r = kv_len - R + 1 + r when `causal` (bottom-right aligned), else kv_len.

    Args:
        q: [B, R, Hq, D].
        k_cache, v_cache: [num_pages, Hkv, page_size, D], any strides and any dtype, float8_e4m3fn (unscaled)
            included, which is widened; Hq is a multiple of Hkv. `v_cache=None` means
            a latent cache (MLA): the leading `value_dim` channels of a row are its value.
        page_table: int32 [B, max_pages].
        kv_lens: int32 [B]; may be smaller than R.
        max_kv_len: host-side bound of `kv_lens`, so that no value is read back from the device.
        scale: factor of the scores.
        first_keys: int32 [B, R], the first key that a row sees: the lower end of a sliding window; None for 0.
        value_dim: Dv of a latent cache.

    Returns:
        out [B, R, Hq, Dv] in q's dtype (Dv = D but for a latent cache) and lse2 float32 [B, R, Hq]; a row without
        keys gives 0 and -inf.
        Slots that no row of a request sees may hold NaN or Inf.
    """
    assert q.shape[0] == page_table.shape[0] == kv_lens.shape[0], "q, page_table and kv_lens disagree on B"
    assert q.shape[2] % k_cache.shape[1] == 0, "Hq must be a multiple of Hkv"
    assert first_keys is None or first_keys.shape == q.shape[:2], "first_keys must be [B, R]"
    assert (v_cache is None) == (value_dim is not None), "value_dim belongs to a latent cache, which has no V"
    return prefix_attention_reference(
        q,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        causal=causal,
        max_kv_len=max_kv_len,
        scale=scale,
        value_dim=value_dim,
        first_keys=first_keys,
    )
