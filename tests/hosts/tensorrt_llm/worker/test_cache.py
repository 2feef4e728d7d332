"""The worker's cache rows are those of plain decoding, and compaction moves the kept ones alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.hosts.tensorrt_llm.tree_runs import cached_rows, plain_executor, tree_executor
from tests.hosts.tensorrt_llm.worker.runs import PROMPTS, TOKENS, Pair, run
from trtllm_tree.kernels.compact_window_rows import compact_window_rows


@pytest.mark.parametrize("options", [{}, {"kv_manager": "v2", "tokens_per_block": 32}], ids=["v1", "v2"])
def test_rows_behind_every_step_are_those_of_plain_decoding(
    layout: str, pair: Pair, options: dict[str, Any]
) -> None:
    """What is committed is a chain's: row p holds the K and V of token p, in every layer."""
    plain = plain_executor(pair[0], max_batch_size=3, **options)
    requests = [plain.submit(prompt, max_tokens=2 * TOKENS) for prompt in PROMPTS[:3]]
    while not all(len(request.generated) > TOKENS + 6 for request in requests):
        plain.step()
    wanted = [cached_rows(plain, request, len(request.tokens) - 1) for request in requests]
    executor = tree_executor(*pair, max_batch_size=3, **options)
    found = [executor.submit(prompt, max_tokens=TOKENS) for prompt in PROMPTS[:3]]
    steps = 0
    while executor.step():
        for request, rows in zip(found, wanted, strict=True):
            if request.py_request_id not in executor.kv_cache_manager.ledger.blocks:
                continue
            count = len(request.tokens) - 1
            # One row or N of them at once: their sums are added in another order.
            error = (cached_rows(executor, request, count) - rows[:, :, :, :count]).abs().amax()
            assert error < 1e-5 * rows.abs().amax()
            steps += 1
    assert steps > TOKENS // 2


@contextmanager
def watched_compaction(executor: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Checks every move of rows, byte for byte over whole pools; gives the paths."""
    import trtllm_tree.attention.compact as module

    paths: list[torch.Tensor] = []
    pool = executor.model.spec_worker._parts.pool
    pages = executor.kv_cache_manager.pools

    def compact(table: Any, slots: torch.Tensor, path: torch.Tensor, *, max_depth: int | None = None) -> None:
        paths.append(path.clone())
        wanted = [pool_.clone() for pool_ in pages]
        layers = [layer for layer in executor.kv_cache_manager.layer_offsets if layer < 4]
        before = [[view.clone() for view in pool.views(layer) if view is not None] for layer in layers]
        compact_window_rows(table, slots, path, max_depth=max_depth)
        moved = torch.zeros((), dtype=torch.bool)
        for layer, old in zip(layers, before, strict=True):
            (group,) = {pool.group_of(layer)}
            for view, was in zip(pool.views(layer), old, strict=True):
                assert view is not None
                expected = was.clone()
                for b, kept in enumerate(path.tolist()):
                    for depth, node in enumerate(node for node in kept if node >= 0):
                        source, into = int(slots[group, b, node]), int(slots[group, b, depth])
                        rows = was[source // pool.page_size, :, source % pool.page_size]
                        expected[into // pool.page_size, :, into % pool.page_size] = rows
                        moved |= source != into
                assert view.view(torch.int32).equal(expected.view(torch.int32))
        if not moved:
            # Then not a byte of any pool, the head's included, has changed.
            assert all(
                p.view(torch.int32).equal(w.view(torch.int32)) for p, w in zip(pages, wanted, strict=True)
            )

    monkeypatch.setattr(module, "compact_window_rows", compact)
    yield paths
    monkeypatch.setattr(module, "compact_window_rows", compact_window_rows)


def test_compaction_moves_the_kept_rows_and_touches_no_other(
    new_layout: None, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = tree_executor(*pair, max_batch_size=3)
    with watched_compaction(executor, monkeypatch) as paths:
        run(executor, PROMPTS[:3], counts=[12, 7, 12])
    branches = [kept for path in paths for kept in path.tolist() if kept[1] > 1]
    assert branches, "no step left the best path"
