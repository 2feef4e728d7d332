"""Invariant I2: a chain is the tree `parent[i] = i - 1`, and with topk 1 no tree exists."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.oracles import trees
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.kernels.tree_ancestors import tree_ancestors
from trtllm_tree.tree.topology import chain_parents, is_chain, mask_words


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 64, 65, 128])
def test_a_chain_hangs_each_node_on_the_one_before(device, num_nodes):
    parents = chain_parents(num_nodes, device)
    assert parents.dtype == torch.int32
    assert parents.tolist() == trees.chain(num_nodes)
    depths, mask = tree_ancestors(parents.unsqueeze(0))
    # Depth is the index and the mask is causal, which is all that makes a tree of a chain's window.
    assert depths.tolist() == [list(range(num_nodes))]
    assert mask.tolist() == [trees.mask_words(trees.chain(num_nodes))]


def test_of_all_trees_with_five_nodes_one_is_a_chain():
    all_trees = [[-1, *rest] for rest in itertools.product(*(range(node) for node in range(1, 5)))]
    assert len(all_trees) == 24
    assert [tree for tree in all_trees if is_chain(tree)] == [[-1, 0, 1, 2, 3]]
    assert not is_chain([0, 0, 1]), "a chain starts with a root"


def test_a_mask_has_a_word_for_every_64_nodes_and_at_least_one():
    counts = (0, 1, 63, 64, 65, 128, 129, 256)
    assert [mask_words(count) for count in counts] == [1, 1, 1, 1, 2, 2, 3, 4]


def test_topk_1_is_no_tree_and_its_window_is_the_chain_of_its_steps():
    for steps in range(1, 11):
        config = SpeculativeConfig(tree_topk=1, num_steps=steps, speculative_model="head")
        assert not config.is_tree
        assert config.num_nodes == config.max_path_len == steps + 1
    assert SpeculativeConfig(tree_topk=2, speculative_model="head").is_tree
