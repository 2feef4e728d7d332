"""Leaves at 8k keys, with trees of one, two and four mask words and with lanes, against dense attention in float64.

Every slot that no row sees is NaN or infinite, those behind the prefix on its last page too, and those of the window
that are nobody's ancestor. Errors are measured and printed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from tests.attention.test_tree_attention_cascade import lane_rows
from tests.oracles import trees
from tests.oracles.attention_paths import pack_bits
from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.cascade import TreeCascade, TreeCascadeRows
from trtllm_tree.attention.leaves.flashinfer_fa2 import FlashinferFa2Leaf
from trtllm_tree.attention.leaves.triton import TritonLeaf

pytestmark = pytest.mark.gpu

FP32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
PAGE = 64
# (heads, KV heads, channels, value channels or None)
Form = tuple[int, int, int, int | None]
GROUPED, LATENT = (32, 8, 128, None), (16, 1, 576, 512)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [R, Hq, D] over keys [n, Hkv, D] by seen [R, n], float64."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (
        torch.nan_to_num(x.double(), 0.0, 0.0, 0.0).repeat_interleave(group, dim=1) for x in (keys, values)
    )
    scores = torch.einsum("rhd,nhd->rhn", q.double(), keys) * scale
    weights = torch.softmax(scores.masked_fill(~seen[:, None], -math.inf), dim=-1)
    return torch.einsum("rhn,nhd->rhd", weights, values)


def _verify_rows(num_nodes: int) -> list[list[int]]:
    parents = trees.random_tree(random.Random(num_nodes), num_nodes)
    return [trees.path_to(parents, node) for node in range(num_nodes)]


# Name: (columns that each row sees, window).
WINDOWS = {f"verify {n}": (_verify_rows(n), n) for n in (1, 5, 64, 128, 256)}
WINDOWS |= {
    f"lanes {k}x{steps}": (lane_rows(random.Random(k), k, steps - 1), (steps - 1) * k)
    for k, steps in ((4, 5), (8, 9), (8, 33))
}


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize(
    ("form", "kv_dtype"), [(GROUPED, BF16), (GROUPED, FP8), (GROUPED, FP32), (LATENT, BF16), (LATENT, FP8)]
)
def test_the_triton_leaf(kind: str, form: Form, kv_dtype: torch.dtype) -> None:
    _check(TritonLeaf, kind, form, kv_dtype)


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_the_fa2_leaf(kind: str, kv_dtype: torch.dtype) -> None:
    pytest.importorskip("flashinfer")
    _check(FlashinferFa2Leaf, kind, GROUPED, kv_dtype)


def _check(
    leaf: Callable[[torch.device, LeafShape], AttentionLeaf], kind: str, form: Form, kv_dtype: torch.dtype
) -> None:
    (heads, kv_heads, dim, value_dim), (visible, window) = form, WINDOWS[kind]
    dtype = FP32 if kv_dtype == FP32 else BF16
    torch.manual_seed(window)
    prefixes = [8191, 8192, 8193, 0, 1, PAGE - 1, PAGE, max(window - 1, 2), window]
    batch, device, num_rows = len(prefixes), torch.device("cuda"), len(visible)
    max_pages = -(-(max(prefixes) + window) // PAGE)
    table = (1 + torch.randperm(batch * max_pages, device=device)).view(batch, max_pages).int()
    pool_shape = (1 + batch * max_pages, 2, kv_heads, PAGE, dim)
    pool = torch.full(pool_shape, math.nan, device=device, dtype=dtype)
    if kv_dtype != FP8:
        pool[:, :, :, 1::2] = math.inf
    ancestors = torch.tensor(sorted({column for row in visible for column in row}), device=device)
    for b, prefix in enumerate(prefixes):
        position = torch.cat([torch.arange(prefix, device=device), prefix + ancestors])
        rows = torch.randn(len(position), 2, kv_heads, dim, device=device)
        pool[table[b, position // PAGE].long(), :, :, position % PAGE] = rows.to(dtype)
    pool = pool.to(kv_dtype)
    k_cache, v_cache = pool[:, 0], pool[:, 1] if value_dim is None else None
    q = torch.randn(batch, num_rows, heads, dim, device=device).to(dtype)
    mask = pack_bits(visible, window).to(device).expand(batch, -1, -1).contiguous()
    shape = LeafShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=PAGE,
        dtype=dtype,
        kv_dtype=kv_dtype,
        value_dim=value_dim,
        max_batch=batch,
        max_rows=num_rows,
    )
    lens, scale = torch.tensor(prefixes, dtype=torch.int32, device=device), dim**-0.5
    rows = TreeCascadeRows(prefix_lens=lens, mask=mask, window=window, max_prefix_len=max(prefixes))
    cascade = TreeCascade(leaf(device, shape))
    cascade.plan(table, rows, scale)
    out = cascade.attend(q, k_cache, v_cache, table, rows, scale)

    worst = 0.0
    for b, prefix in enumerate(prefixes):
        position = torch.arange(prefix + window, device=device)
        page, offset = table[b, position // PAGE].long(), position % PAGE
        keys = k_cache.float()[page, :, offset]
        values = keys[..., :value_dim] if v_cache is None else v_cache.float()[page, :, offset]
        seen = torch.zeros(num_rows, len(position), dtype=torch.bool, device=device)
        seen[:, :prefix] = True
        for row, columns in enumerate(visible):
            seen[row, [prefix + column for column in columns]] = True
        truth = _attend(q[b], keys, values, seen, scale)
        worst = max(worst, (out[b].double() - truth).abs().max().item())
    print(f"{kind}, {heads}/{kv_heads} heads of {dim}, {kv_dtype}: off by {worst:.2g} at most")
    assert worst <= (1e-5 if dtype == FP32 else 2e-2)
