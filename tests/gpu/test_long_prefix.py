"""The triton leaf at 8k keys, with trees of one, two and four mask words, against dense attention in float64.

Every slot that no row sees is NaN, those behind the prefix on its last page too. Errors are measured and printed.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.oracles import trees
from tests.oracles.attention_paths import pack_bits
from trtllm_tree.attention.base import LeafShape
from trtllm_tree.attention.cascade import TreeCascade, TreeCascadeRows
from trtllm_tree.attention.leaves.triton import TritonLeaf

pytestmark = pytest.mark.gpu

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PAGE, PREFIX = 64, [8191, 8192, 8193, 0, 63]
# (heads, KV heads, channels, value channels or None)
GROUPED, LATENT = (32, 8, 128, None), (16, 1, 576, 512)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [R, Hq, D] over keys [n, Hkv, D] by seen [R, n], float64."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (torch.nan_to_num(x.double()).repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("rhd,nhd->rhn", q.double(), keys) * scale
    weights = torch.softmax(scores.masked_fill(~seen[:, None], -math.inf), dim=-1)
    return torch.einsum("rhn,nhd->rhd", weights, values)


@pytest.mark.parametrize("num_nodes", [64, 128, 256])
@pytest.mark.parametrize(
    ("form", "kv_dtype"), [(GROUPED, BF16), (GROUPED, FP8), (LATENT, BF16), (LATENT, FP8)]
)
def test_long_prefixes_and_large_trees(
    num_nodes: int, form: tuple[int, int, int, int | None], kv_dtype: torch.dtype
) -> None:
    heads, kv_heads, dim, value_dim = form
    torch.manual_seed(num_nodes)
    rng, batch, device = random.Random(num_nodes), len(PREFIX), "cuda"
    max_pages = -(-(max(PREFIX) + num_nodes) // PAGE)
    table = (1 + torch.randperm(batch * max_pages, device=device)).view(batch, max_pages).int()
    pool_shape = (1 + batch * max_pages, 2, kv_heads, PAGE, dim)
    pool = torch.full(pool_shape, math.nan, device=device, dtype=BF16)
    paths = [trees.random_tree(rng, num_nodes) for _ in PREFIX]
    visible = [[trees.path_to(parents, node) for node in range(num_nodes)] for parents in paths]
    for b, prefix in enumerate(PREFIX):
        position = torch.arange(prefix + num_nodes, device=device)
        rows = torch.randn(len(position), 2, kv_heads, dim, device=device)
        pool[table[b, position // PAGE].long(), :, :, position % PAGE] = rows.to(BF16)
    pool = pool.to(kv_dtype)
    k_cache, v_cache = pool[:, 0], pool[:, 1] if value_dim is None else None
    q = torch.randn(batch, num_nodes, heads, dim, device=device).to(BF16)
    mask = torch.stack([pack_bits(rows, num_nodes) for rows in visible]).to(device)
    shape = LeafShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=PAGE,
        dtype=BF16,
        kv_dtype=kv_dtype,
        value_dim=value_dim,
    )
    lens, scale = torch.tensor(PREFIX, dtype=torch.int32, device=device), dim**-0.5
    rows = TreeCascadeRows(prefix_lens=lens, mask=mask, window=num_nodes, max_prefix_len=max(PREFIX))
    out = TreeCascade(TritonLeaf(torch.device(device), shape)).attend(q, k_cache, v_cache, table, rows, scale)

    worst = 0.0
    for b, prefix in enumerate(PREFIX):
        position = torch.arange(prefix + num_nodes, device=device)
        page, offset = table[b, position // PAGE].long(), position % PAGE
        keys = k_cache.float()[page, :, offset]
        values = keys[..., :value_dim] if v_cache is None else v_cache.float()[page, :, offset]
        seen = torch.zeros(num_nodes, len(position), dtype=torch.bool, device=device)
        seen[:, :prefix] = True
        for node, path in enumerate(visible[b]):
            seen[node, [prefix + ancestor for ancestor in path]] = True
        truth = _attend(q[b], keys, values, seen, scale)
        worst = max(worst, (out[b].double() - truth).abs().max().item())
    print(f"N {num_nodes}, {heads}/{kv_heads} heads of {dim}, {kv_dtype}: off by {worst:.4f} at most")
    assert worst <= 2e-2
