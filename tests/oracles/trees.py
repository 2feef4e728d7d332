"""Slow truth of tree shape: one tree as a list of parents, every question answered by walking up.

Also draws random trees and root paths for tests. It must not import the package.
"""

from __future__ import annotations

import random


def chain(num_nodes: int) -> list[int]:
    """The parents of a chain."""
    return [node - 1 for node in range(num_nodes)]


def star(num_nodes: int) -> list[int]:
    """The parents of a root with nothing but children."""
    return [-1] + [0] * (num_nodes - 1)


def random_tree(rng: random.Random, num_nodes: int) -> list[int]:
    """The parents of a tree in which each node hangs on any earlier one; later ones are likelier."""
    return [-1] + [max(rng.randrange(node), rng.randrange(node)) for node in range(1, num_nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Node ids from the root down to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def depths(parents: list[int]) -> list[int]:
    """Edges between the root and each node."""
    return [len(path_to(parents, node)) - 1 for node in range(len(parents))]


def mask_words(parents: list[int]) -> list[list[int]]:
    """Per node, the signed 64-bit words with the bits of the node and its ancestors set."""
    words = -(-len(parents) // 64)
    rows = []
    for node in range(len(parents)):
        bits = sum(1 << ancestor for ancestor in path_to(parents, node))
        row = [(bits >> (64 * word)) % 2**64 for word in range(words)]
        rows.append([word - 2**64 if word >= 2**63 else word for word in row])
    return rows


def random_path(rng: random.Random, parents: list[int], max_len: int | None = None) -> list[int]:
    """A root path of at most `max_len` nodes, -1 padded to N."""
    path = path_to(parents, rng.randrange(len(parents)))[:max_len]
    return path + [-1] * (len(parents) - len(path))
