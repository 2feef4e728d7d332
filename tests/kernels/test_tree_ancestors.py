"""tree_ancestors, as torch reference and as Triton kernel, against a walk up the parents of every node."""

from __future__ import annotations

import random

import pytest
import torch

from trtllm_tree.kernels.tree_ancestors import tree_ancestors

GARBAGE = -12345


@pytest.fixture(params=["reference", "triton"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_TREE_KERNELS", request.param)


def forests(num_nodes: int) -> list[list[int]]:
    """A chain, a star, a random tree, and parents that may be anything."""
    rng = random.Random(num_nodes)
    later = range(1, num_nodes)
    return [
        list(range(-1, num_nodes - 1)),
        [-1] + [0 for _ in later],
        [-1] + [rng.randrange(i) for i in later],
        [
            rng.choice((rng.randrange(i + 1), i - 1, i, i + 1, num_nodes, -(2**31), 2**31 - 1))
            for i in range(num_nodes)
        ],
    ]


def walk_up(parents: list[int], node: int) -> list[int]:
    path = [node]
    while 0 <= parents[path[-1]] < path[-1]:
        path.append(parents[path[-1]])
    return path


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 31, 64, 65, 128, 200, 256])
def test_every_node_sees_itself_and_its_ancestors_and_nothing_else(num_nodes, device):
    trees = forests(num_nodes)
    words = -(-num_nodes // 64)
    # Batch-strided views into larger buffers: what lies between the rows must stay.
    parents = torch.full((4, num_nodes + 3), GARBAGE, dtype=torch.int32, device=device)[:, :num_nodes]
    parents.copy_(torch.tensor(trees))
    depth_buffer = torch.full((4, num_nodes + 5), GARBAGE, dtype=torch.int32, device=device)
    mask_buffer = torch.full((4, num_nodes + 1, words + 1), GARBAGE, dtype=torch.int64, device=device)
    depths, mask = depth_buffer[:, :num_nodes], mask_buffer[:, :num_nodes, :words]
    returned = tree_ancestors(parents, depths=depths, ancestor_mask=mask)
    assert returned[0] is depths
    assert returned[1] is mask

    for tree, tree_depths, tree_mask in zip(trees, depths.tolist(), mask.tolist(), strict=True):
        for i in range(num_nodes):
            path = walk_up(tree, i)
            seen = [w * 64 + j for w in range(words) for j in range(64) if tree_mask[i][w] >> j & 1]
            assert tree_depths[i] == len(path) - 1
            assert seen == sorted(path)
    assert (depth_buffer[:, num_nodes:] == GARBAGE).all()
    assert (mask_buffer[:, num_nodes:] == GARBAGE).all()
    assert (mask_buffer[:, :, words:] == GARBAGE).all()


def test_a_chain_of_64_fills_one_word_from_the_bottom(device):
    parents = torch.arange(-1, 63, dtype=torch.int32, device=device)[None]
    depths, mask = tree_ancestors(parents)
    assert depths[0].tolist() == list(range(64))
    assert mask[0, :, 0].tolist() == [2 ** (i + 1) - 1 for i in range(63)] + [-1]


@pytest.mark.parametrize("num_nodes", [1, 2, 31, 64, 65, 128, 256])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_loaded_step_is_that_of_its_slots_and_its_positions_follow_depth(num_nodes, dtype, device):
    # Two pad rows share slot 0; slot 4 is nobody's.
    slots, first = [3, 0, 5, 1, 2, 0], [7, 0, 100, 10**6, 3, 0]
    maps = [*forests(num_nodes), [GARBAGE] * num_nodes, list(range(-1, num_nodes - 1))]
    batch, words = len(slots), -(-num_nodes // 64)

    def buffer(rows: int, *tail: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows, num_nodes + 3, *tail), GARBAGE, dtype=dtype, device=device)

    parent_map = buffer(len(maps), dtype=torch.int32)
    parent_map[:, :num_nodes] = torch.tensor(maps)
    buffers = {
        "depths": buffer(batch, dtype=torch.int32),
        "ancestor_mask": buffer(batch, words, dtype=torch.int64),
        "loaded_parents": buffer(batch, dtype=torch.int32),
        "positions": buffer(batch, dtype=dtype),
        "shift": buffer(batch, dtype=torch.int64),
    }
    chain = [[length + i for i in range(num_nodes)] for length in first]
    buffers["positions"][:, :num_nodes] = torch.tensor(chain)
    views = {name: tensor[:, :num_nodes] for name, tensor in buffers.items()}
    tree_ancestors(parent_map[:, :num_nodes], slots=torch.tensor(slots, device=device), **views)

    for b, (slot, length) in enumerate(zip(slots, first, strict=True)):
        paths = [walk_up(maps[slot], i) for i in range(num_nodes)]
        depths = [len(path) - 1 for path in paths]
        masks = [sum(1 << node for node in path) for path in paths]
        seen = [[word % 2**64 for word in row] for row in views["ancestor_mask"][b].tolist()]
        assert views["loaded_parents"][b].tolist() == maps[slot]
        assert views["depths"][b].tolist() == depths
        assert views["positions"][b].tolist() == [length + depth for depth in depths]
        assert views["shift"][b].tolist() == [depth - i for i, depth in enumerate(depths)]
        assert seen == [[mask >> 64 * w & (2**64 - 1) for w in range(words)] for mask in masks]
    assert all((tensor[:, num_nodes:] == GARBAGE).all() for tensor in buffers.values())
    assert parent_map[:, :num_nodes].tolist() == maps


def test_a_step_is_loaded_with_all_of_its_tensors_or_none(device):
    parents = torch.zeros(3, 4, dtype=torch.int32, device=device)
    with pytest.raises(AssertionError, match="all of its tensors"):
        tree_ancestors(parents, slots=torch.tensor([0], device=device))
