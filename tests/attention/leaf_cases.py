"""Cases for leaves that rest on other packages, and the truth of a cascade over them."""

from __future__ import annotations

import torch

from tests.attention.test_tree_attention_cascade import Case
from tests.oracles import attention_paths as oracle
from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.cascade import TreeCascade
from trtllm_tree.attention.leaves.fp8 import query_for

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# Output and cache have 8 and 4 significant bits; the truth rounds the query as the leaf does. Of what is larger than 1,
# relative: bfloat16's own spacing is 0.03 from 4 on, and the partial is rounded before the merge is.
TOLERANCE = 2e-2


def shape_of(case: Case | LatentCase) -> LeafShape:
    _, heads, page_size, dim = case.k_cache.shape
    return LeafShape(
        num_heads=case.q.shape[2],
        num_kv_heads=heads,
        head_dim=dim,
        page_size=page_size,
        dtype=case.q.dtype,
        kv_dtype=case.k_cache.dtype,
        value_dim=case.value_dim if isinstance(case, LatentCase) else None,
        max_batch=len(case.q),
        max_rows=case.q.shape[1],
    )


class LatentCase:
    """A latent cache in which only seen slots are numbers, and the float64 truth row by row."""

    def __init__(
        self,
        device: str,
        prefix_lens: list[int],
        visible: list[list[list[int]]],
        window: int,
        *,
        dims: tuple[int, int] = (256, 64),
        kv_dtype: torch.dtype = BF16,
        heads: int = 2,
        page_size: int = 32,
    ) -> None:
        torch.manual_seed(window + sum(prefix_lens))
        self.value_dim, width = dims[0], sum(dims)
        plain = Case(
            device,
            prefix_lens,
            visible,
            window,
            page_size=page_size,
            heads=(heads, 1),
            dtype=BF16,
            head_dim=width,
        )
        self.q, self.page_table, self.rows = plain.q, plain.page_table, plain.rows
        self.k_cache, self.v_cache = plain.k_cache.to(kv_dtype), None
        self.scale = width**-0.5
        self.truth = truth(self, prefix_lens, visible, self.k_cache, self.scale)[..., : self.value_dim]


def truth(
    case: Case | LatentCase,
    prefix_lens: list[int],
    visible: list[list[list[int]]],
    values: torch.Tensor,
    scale: float,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """float64 [B, R, Hq, D] in which an FP8 cache's prefix partial sees the query rounded to FP8, and the rest not."""
    q, batch, rows = case.q, *case.q.shape[:2]
    rounded = query_for(q, case.k_cache.dtype) if causal else q
    group = q.shape[2] // case.k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for b in range(batch):
        table, prefix = case.page_table[b].tolist(), prefix_lens[b]
        positions = list(range(prefix + case.rows.window))
        for head in range(q.shape[2]):
            key_rows = oracle.key_rows(case.k_cache, table, positions, head // group)
            value_rows = oracle.key_rows(values, table, positions, head // group)
            for r in range(rows):
                covered = max(prefix - rows + 1 + r, 0) if causal else prefix
                chosen = [*range(prefix), *(prefix + j for j in sorted(set(visible[b][r])))]
                scores = torch.cat(
                    [
                        key_rows[chosen[:covered]] @ rounded[b, r, head].double(),
                        key_rows[chosen[covered:]] @ q[b, r, head].double(),
                    ]
                )
                if chosen:
                    out[b, r, head] = torch.softmax(scores * scale, dim=0) @ value_rows[chosen]
    return out


def check(leaf: AttentionLeaf, case: Case | LatentCase, expected: torch.Tensor, scale: float) -> None:
    cascade = TreeCascade(leaf)
    cascade.plan(case.page_table, case.rows, scale)
    # Twice: scratch of the first call must not show in the second.
    for _ in range(2):
        out = cascade.attend(case.q, case.k_cache, case.v_cache, case.page_table, case.rows, scale)
        assert out.shape == expected.shape
        assert out.dtype == case.q.dtype
        error = ((out.double() - expected).abs() / expected.abs().clamp(min=1)).max().item()
        assert error <= TOLERANCE, f"off by {error}"


def as_fp8(case: Case) -> Case:
    case.k_cache, case.v_cache = case.k_cache.to(FP8), case.v_cache.to(FP8)
    # Such a query leaves FP8's range.
    case.q[0, 0, 0, 0] = 600.0
    case.q[0, 0, 0, 1:] = 0.0
    return case
