"""Every op gives the same bits again, at the sizes that are benchmarked: no race, and no order left to chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trtllm_tree.bench.ops.registry import REGISTRY

pytestmark = pytest.mark.gpu

# Compaction changes its input (tests/kernels/test_compact_groups.py runs it twice), a round and an expansion their
# state. The drafting of a round contains the expansion and the accepted rows.
OPS = sorted(set(REGISTRY) - {"compact_window_rows", "round_glue", "draft_tree_expand", "accepted_rows"})


def _bits(result: Any) -> list[torch.Tensor]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [tensor.detach().clone().view(torch.uint8) for tensor in tensors]


@pytest.mark.parametrize("op", OPS)
def test_an_op_gives_the_same_bits_again(op: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    call, other = REGISTRY[op].build(REGISTRY[op].cases[0], 2, generator).calls
    first, different = _bits(call()), _bits(other())
    assert not all(torch.equal(a, b) for a, b in zip(first, different, strict=True)), "two inputs, one result"
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, _bits(call()), strict=True))
