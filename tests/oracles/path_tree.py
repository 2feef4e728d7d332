"""Slow truth of a drafter: grows the tree over token paths, asking a scorer for each path's best children.

Nothing here knows entries, lanes by number, masks or buffers: a candidate is its path from the root. It must
not import the package, nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Path = tuple[int, ...]
# The best children of a path, best first: (log-probability, token).
Scorer = Callable[[Path], list[tuple[float, int]]]


@dataclass(frozen=True)
class PathTree:
    """The selected tree in depth-first order; the root comes first."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


def grow(best: Scorer, *, topk: int, num_steps: int) -> dict[Path, float]:
    """Cumulative log-probability of every candidate path of one round."""
    candidates: dict[Path, float] = {}
    lanes: list[Path] = [()]
    for _ in range(num_steps):
        level = {
            (*lane, token): candidates.get(lane, 0.0) + score
            for lane in lanes
            for score, token in best(lane)[:topk]
        }
        candidates |= level
        lanes = sorted(level, key=level.__getitem__, reverse=True)[:topk]
    return candidates


def draft(best: Scorer, root: int, *, topk: int, num_steps: int, num_nodes: int) -> PathTree:
    """The best `num_nodes - 1` candidate paths as a tree under `root`, each node's best child first."""
    candidates = grow(best, topk=topk, num_steps=num_steps)
    kept = sorted(candidates, key=candidates.__getitem__, reverse=True)[: num_nodes - 1]
    tree = PathTree([root], [-1], [0.0])

    def visit(path: Path, node: int) -> None:
        for child in kept:
            if child[:-1] == path:
                tree.tokens.append(child[-1])
                tree.parents.append(node)
                tree.scores.append(candidates[child])
                visit(child, len(tree.tokens) - 1)

    visit((), 0)
    return tree


def greedy_chain(best: Scorer, root: int, *, num_steps: int) -> list[int]:
    """The root and the best child of the best child, `num_steps` deep."""
    path: Path = ()
    for _ in range(num_steps):
        path = (*path, best(path)[0][1])
    return [root, *path]
