"""Slow truth of paged attention over a prefix and a masked window: one row and one head at a time.

Everything is float64 and plain Python over positions. It attends all visible keys at once and knows
nothing of partials being merged; `prefix_partial` makes what a prefix leaf would hand over. It must not
import the package.
"""

from __future__ import annotations

import math

import torch


def pack_bits(rows: list[list[int]], window: int) -> torch.Tensor:
    """int64 [len(rows), ceil(window / 64)] with bit j of a row set for every column j it lists."""
    words = -(-window // 64)
    packed = []
    for columns in rows:
        bits = sum(1 << j for j in set(columns))
        row = [(bits >> (64 * w)) & (2**64 - 1) for w in range(words)]
        packed.append([word - 2**64 if word >= 2**63 else word for word in row])
    return torch.tensor(packed, dtype=torch.int64)


def key_rows(cache: torch.Tensor, table: list[int], positions: list[int], head: int) -> torch.Tensor:
    """float64 [len(positions), D]: rows of one KV head, an unallocated position being in page 0."""
    page_size = cache.shape[2]
    rows = []
    for position in positions:
        index = position // page_size
        page = max(table[index], 0) if index < len(table) else 0
        rows.append(cache[page, head, position % page_size].double())
    return (
        torch.stack(rows)
        if rows
        else torch.zeros(0, cache.shape[3], dtype=torch.float64, device=cache.device)
    )


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, float]:
    """(output [D], lse2) of one query over its keys; zeros and -inf without keys."""
    if len(keys) == 0:
        return torch.zeros_like(q, dtype=torch.float64), -math.inf
    scores = (keys @ q.double()) * scale
    top = scores.max()
    weights = torch.exp(scores - top)
    return (weights @ values) / weights.sum(), float((torch.log(weights.sum()) + top) / math.log(2))


def prefix_partial(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: list[int],
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 (out [B, R, Hq, D], lse2 [B, R, Hq]) of a prefix leaf; NaN where a row covers no key."""
    batch, num_rows, num_heads, _ = q.shape
    group = num_heads // k_cache.shape[1]
    out = torch.full(q.shape, math.nan, dtype=torch.float64, device=q.device)
    lse2 = torch.full(q.shape[:3], math.nan, dtype=torch.float64, device=q.device)
    for b in range(batch):
        table, positions = page_table[b].tolist(), list(range(prefix_lens[b]))
        for head in range(num_heads):
            keys = key_rows(k_cache, table, positions, head // group)
            values = key_rows(v_cache, table, positions, head // group)
            for r in range(num_rows):
                count = prefix_lens[b] - num_rows + 1 + r if causal else prefix_lens[b]
                if count > 0:
                    out[b, r, head], lse2[b, r, head] = attend(
                        q[b, r, head], keys[:count], values[:count], scale
                    )
    return out, lse2


def window_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: list[int],
    visible: list[list[list[int]]],
    *,
    scale: float,
) -> torch.Tensor:
    """float64 [B, R, Hq, D]: row r of request b sees its whole prefix and the columns visible[b][r]."""
    batch, num_rows, num_heads, _ = q.shape
    group = num_heads // k_cache.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b in range(batch):
        table, prefix = page_table[b].tolist(), prefix_lens[b]
        # Rows that nobody sees are looked up too, and may be NaN, but no row selects them.
        width = 1 + max((j for columns in visible[b] for j in columns), default=-1)
        for head in range(num_heads):
            keys = key_rows(k_cache, table, list(range(prefix + width)), head // group)
            values = key_rows(v_cache, table, list(range(prefix + width)), head // group)
            for r in range(num_rows):
                chosen = list(range(prefix)) + [prefix + j for j in sorted(set(visible[b][r]))]
                out[b, r, head], _ = attend(q[b, r, head], keys[chosen], values[chosen], scale)
    return out


def chosen_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_tables: list[list[list[int]]],
    chosen: list[list[list[tuple[int, int]]]],
    *,
    scale: float,
    sinks: list[float] | None = None,
) -> torch.Tensor:
    """float64 [B, R, Hq, D]: row r of request b attends the keys chosen[b][r], each (table, slot), and its head's sink.

    Slot s of page_tables[b][t] is row s % page_size of page s // page_size. A sink is one more key of that score, of
    value 0.
    """
    group, page_size = q.shape[2] // k_cache.shape[1], k_cache.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for b, rows in enumerate(chosen):
        for r, keys in enumerate(rows):
            pages = [page_tables[b][table][slot // page_size] for table, slot in keys]
            offsets = [slot % page_size for _, slot in keys]
            for head in range(q.shape[2]):
                k = k_cache[pages, head // group, offsets].double()
                v = v_cache[pages, head // group, offsets].double()
                exps = torch.exp((k @ q[b, r, head].double()) * scale)
                total = exps.sum() + (math.exp(sinks[head]) if sinks is not None else 0.0)
                if total > 0:
                    out[b, r, head] = (exps @ v) / total
    return out
