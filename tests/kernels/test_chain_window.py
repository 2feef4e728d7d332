"""chain_window: a Python loop, the torch reference and the Triton kernel agree on every element."""

from __future__ import annotations

import random

import pytest
import torch

from trtllm_tree.kernels.chain_window import chain_window
from trtllm_tree.kernels.chain_window.reference import reference
from trtllm_tree.kernels.chain_window.triton import launch

NUM_SLOTS, GARBAGE = 6, -12345


@pytest.mark.parametrize("num_nodes", [1, 2, 31, 32, 64, 65, 128])
@pytest.mark.parametrize("slots", [[3], [5, 0, 2], [1, 4, 4, 4, 0]])
def test_three_derivations_agree(num_nodes: int, slots: list[int], device: str) -> None:
    rng = random.Random(num_nodes)
    rows = [[rng.randrange(10**6) for _ in range(num_nodes)] for _ in range(NUM_SLOTS)]
    committed = [rng.choice((0, rng.randrange(10**6), 2**31 - 1)) for _ in slots]
    ints = {"dtype": torch.int32, "device": device}
    token_map = torch.full((NUM_SLOTS, num_nodes + 3), GARBAGE, **ints)[:, :num_nodes]
    token_map.copy_(torch.tensor(rows))
    # The largest length must not wrap: positions are 64 bits wide.
    want_tokens = [rows[slot] + [GARBAGE] * 2 for slot in slots]
    want_positions = [[length + i for i in range(num_nodes)] + [GARBAGE] for length in committed]
    index, lens = torch.tensor(slots, device=device), torch.tensor(committed, **ints)
    for run in (chain_window, reference, launch):
        tokens = torch.full((len(slots), num_nodes + 2), GARBAGE, **ints)
        positions = torch.full((len(slots), num_nodes + 1), GARBAGE, dtype=torch.int64, device=device)
        outputs = {"tokens": tokens[:, :num_nodes], "positions": positions[:, :num_nodes]}
        run(token_map, index, lens, **outputs)
        assert tokens.tolist() == want_tokens, run.__module__
        assert positions.tolist() == want_positions, run.__module__
    assert token_map.tolist() == rows
