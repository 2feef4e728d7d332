"""The worker's cache rows are those of plain decoding, and compaction moves the kept ones alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.hosts.tensorrt_llm.tree_runs import tree_executor
from tests.hosts.tensorrt_llm.worker.checks import (
    assert_rows_are_plain_decodings,
)
from tests.hosts.tensorrt_llm.worker.runs import PROMPTS, Pair, run
from trtllm_tree.kernels.compact_window_rows import compact_window_rows


@pytest.mark.parametrize("options", [{}, {"kv_manager": "v2", "tokens_per_block": 32}], ids=["v1", "v2"])
def test_rows_behind_every_step_are_those_of_plain_decoding(
    layout: str, pair: Pair, options: dict[str, Any]
) -> None:
    assert_rows_are_plain_decodings(*pair, **options)


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
