"""`prefix_attention` against float64 attention, one row and head at a time (the partial of invariant I5)."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracles import attention_paths as oracle
from trtllm_tree.kernels.prefix_attention import prefix_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "kv_lens", "page_size", "heads", "slack"),
    [
        (1, [0, 1, 15, 16, 17], 16, (2, 2), 0),
        (5, [0, 1, 4, 5, 6, 31, 32], 16, (6, 2), 9),
        (8, [3, 64, 65], 64, (4, 1), 200),
        (3, [0, 0], 32, (2, 1), 0),
    ],
)
def test_rows_attend_the_first_keys_of_their_request(
    device, num_rows, kv_lens, page_size, heads, slack, causal, dtype
):
    torch.manual_seed(num_rows)
    batch, head_dim, scale = len(kv_lens), 16, 0.4
    max_pages = max(1, -(-max(kv_lens) // page_size))
    wide = 1 + torch.randperm(batch * (max_pages + 2)).view(batch, max_pages + 2).int()
    table = wide[:, :max_pages]
    written = torch.zeros(1 + wide.numel(), page_size, dtype=torch.bool)
    for request, length in enumerate(kv_lens):
        for position in range(length):
            written[table[request, position // page_size], position % page_size] = True
    pool = torch.randn(len(written), 2, heads[1], page_size, head_dim)
    poison = torch.where(torch.rand(pool.shape) < 0.5, math.nan, math.inf)
    pool = torch.where(written[:, None, None, :, None], pool, poison).to(device, dtype)
    # Tokens before heads, as another engine may lay its pages out.
    pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
    q = torch.randn(batch, num_rows, heads[0], head_dim).to(device, dtype)
    args = (q, pool[:, 0], pool[:, 1], table.to(device))
    out, lse2 = prefix_attention(
        *args,
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        causal=causal,
        max_kv_len=max(kv_lens) + slack,
        scale=scale,
    )
    true_out, true_lse2 = oracle.prefix_partial(*args, kv_lens, causal=causal, scale=scale)
    empty = true_lse2.isnan()
    assert (out.dtype, lse2.dtype) == (dtype, torch.float32)
    assert not out[empty].any() and lse2[empty].isneginf().all(), "a row without keys gives 0 and -inf"
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out[~empty].double(), true_out[~empty], atol=tolerance, rtol=0)
    torch.testing.assert_close(lse2[~empty].double(), true_lse2[~empty], atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow(device):
    q = torch.full((1, 1, 1, 16), 1e4, device=device)
    cache = torch.ones(2, 1, 16, 16, device=device)
    table = torch.ones(1, 1, dtype=torch.int32, device=device)
    lens = torch.tensor([4], dtype=torch.int32, device=device)
    out, lse2 = prefix_attention(q, cache, cache, table, lens, causal=False, max_kv_len=4, scale=1.0)
    assert torch.equal(out, torch.ones_like(out))
    assert lse2.item() == pytest.approx(16 * 1e4 / math.log(2) + 2, rel=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value_dim", [24, 17])
def test_latent_rows_are_keys_and_by_their_leading_channels_values(device, causal, value_dim):
    torch.manual_seed(value_dim)
    kv_lens, num_rows, scale = [0, 3, 16, 29], 4, 0.3
    table = torch.tensor([[4, 7], [2, 1], [3, 8], [6, 5]], dtype=torch.int32, device=device)
    pool = torch.full((9, 1, 16, 24), math.nan)
    for request, length in enumerate(kv_lens):
        for position in range(length):
            pool[table[request, position // 16], 0, position % 16] = torch.randn(24)
    pool = pool.to(device)
    q = torch.randn(4, num_rows, 5, 24).to(device)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    options = {"causal": causal, "scale": scale}
    out, lse2 = prefix_attention(q, pool, None, table, lens, max_kv_len=29, value_dim=value_dim, **options)
    true_out, true_lse2 = oracle.prefix_partial(q, pool, pool, table, kv_lens, **options)
    empty = true_lse2.isnan()
    assert out.shape == (4, num_rows, 5, value_dim) and not out[empty].any() and lse2[empty].isneginf().all()
    true_out = true_out[..., :value_dim]
    torch.testing.assert_close(out[~empty].double(), true_out[~empty], atol=1e-5, rtol=0)
    torch.testing.assert_close(lse2[~empty].double(), true_lse2[~empty], atol=1e-5, rtol=1e-5)
