"""Slow truth of the greedy tree walk: one request, plain lists. It must not import the package."""

from __future__ import annotations


def walk(tokens: list[int], parents: list[int], targets: list[int]) -> tuple[list[int], int, list[int]]:
    """The walk of one request, written as the rule reads."""
    path = [0]
    while True:
        current = path[-1]
        children = [j for j in range(current + 1, len(tokens)) if parents[j] == current]
        accepted = [j for j in children if tokens[j] == targets[current] != -1]
        if not accepted:
            break
        path.append(accepted[0])
    padding = [-1] * (len(tokens) - len(path))
    return path + padding, len(path), [targets[node] for node in path] + padding
