"""Flat rows of a chain are attended causally; a tree's rows slide by depth, not by slot."""

from __future__ import annotations

import pytest
import torch

from tests.oracles import trees
from trtllm_tree.attention.cascade import TreeCascade
from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.attention.rows import ChainRows, TreeAttention, verify_rows
from trtllm_tree.kernels.prefix_attention import prefix_attention
from trtllm_tree.tree.verify_batch import TreeVerifyBatch

SCALE, PAGE_SIZE, PREFIXES = 0.4, 4, [0, 9]


def paged_rows(num_rows: int) -> tuple[torch.Tensor, ...]:
    """Queries [2 * R, 4, 8], K and V of 2 heads, and the page tables of two requests."""
    generator = torch.Generator().manual_seed(num_rows)
    pages = -(-(max(PREFIXES) + num_rows) // PAGE_SIZE)
    table = torch.randperm(2 * pages, generator=generator).view(2, pages).int()
    k_cache, v_cache = torch.randn(2, 2 * pages, 2, PAGE_SIZE, 8, generator=generator)
    return torch.randn(2 * num_rows, 4, 8, generator=generator), k_cache, v_cache, table


@pytest.mark.parametrize("num_rows", [1, 6, 65])
def test_the_rows_of_a_chain_see_what_lies_before_them(num_rows: int) -> None:
    q, k_cache, v_cache, table = paged_rows(num_rows)
    prefix_lens = torch.tensor(PREFIXES, dtype=torch.int32)
    chains = ChainRows(torch.device("cpu"))
    for _ in range(2):
        rows = chains.behind(prefix_lens, num_rows, max(PREFIXES))
        out = TreeAttention(TreeCascade(ReferenceLeaf()), rows).attend(q, k_cache, v_cache, table, SCALE)
        expected, _ = prefix_attention(
            q.view(2, num_rows, 4, 8),
            k_cache,
            v_cache,
            table,
            prefix_lens + num_rows,
            causal=True,
            max_kv_len=max(PREFIXES) + num_rows,
            scale=SCALE,
        )
        torch.testing.assert_close(out, expected.flatten(0, 1))


def test_a_trees_rows_slide_by_depth() -> None:
    """Siblings see equally many keys of the prefix, whatever their slots."""
    parents = trees.star(5)
    tree = TreeVerifyBatch(
        parents=torch.tensor([parents] * 2, dtype=torch.int32),
        depths=torch.tensor([trees.depths(parents)] * 2, dtype=torch.int32),
        ancestor_mask=torch.tensor([trees.mask_words(parents)] * 2),
    )
    q, k_cache, v_cache, table = paged_rows(5)
    rows = verify_rows(tree, torch.tensor(PREFIXES, dtype=torch.int32), max(PREFIXES))
    attention = TreeAttention(TreeCascade(ReferenceLeaf()), rows)
    out = attention.attend(q, k_cache, v_cache, table, SCALE, sliding_window=3).view(2, 5, 4, 8)
    for request, prefix in enumerate(PREFIXES):
        slots = [(int(table[request, p // PAGE_SIZE]), p % PAGE_SIZE) for p in range(prefix + 5)]
        for node, depth in enumerate(trees.depths(parents)):
            positions = [*range(max(0, prefix + depth - 2), prefix)]
            seen = positions + [prefix + column for column in trees.path_to(parents, node)]
            k = torch.stack([k_cache[page, :, at] for page, at in (slots[p] for p in seen)], dim=1)
            v = torch.stack([v_cache[page, :, at] for page, at in (slots[p] for p in seen)], dim=1)
            heads = q.view(2, 5, 2, 2, 8)[request, node]
            weights = (heads @ k.transpose(1, 2) * SCALE).softmax(-1)
            torch.testing.assert_close(out[request, node], (weights @ v).flatten(0, 1))
