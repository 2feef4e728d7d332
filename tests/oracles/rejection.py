"""Recursive rejection at one node in plain Python: probabilities that sum to 1, normalised after every rejection."""

from __future__ import annotations

import math

from tests.oracles.seeded_draw import law, noise, philox

_WORD = 2**32


def uniform(index: int, seed: int, position: int) -> float:
    """The number that decides about sibling `index`."""
    seed, position = seed % 2**64, position % 2**64
    counter = (index, position % _WORD, position // _WORD, 1)
    first, second, _, _ = philox(counter, (seed % _WORD, seed // _WORD))
    return (first * 2**20 + second // 2**12 + 0.5) / 2**52


def _scaled(weights: dict[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {i: weight / total for i, weight in weights.items()} if total > 0 else weights


def rejection_token(
    row: list[float],
    children: list[int],
    draft: list[float] | None,
    seed: int,
    position: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> int:
    """The token behind a node; `children` are the tokens of its children, drawn from `draft` if there is one."""
    if any(math.isnan(value) for value in row):
        return -1
    if temperature == 0:
        return max(range(len(row)), key=lambda i: (row[i], -i))
    target = law(row, temperature, top_k, top_p, min_p)
    drawn = noise(len(row), seed, position)
    offers = _scaled(dict(enumerate(draft))) if draft and any(draft) and children else None
    for sibling, child in enumerate(children):
        number, wanted = uniform(sibling, seed, position), target.get(child, 0.0)
        if offers is None:
            if number < wanted:
                return child
            target = _scaled({i: p for i, p in target.items() if i != child})
        elif offers.get(child):
            if number * offers[child] < wanted:
                return child
            target = _scaled({i: max(p - offers.get(i, 0.0), 0.0) for i, p in target.items()})
            offers = _scaled(offers | {child: 0.0})
    if offers is None:
        return max(target, key=lambda i: (row[i] + temperature * drawn[i], -i))
    left = {i: p for i, p in target.items() if p > 0}
    return max(left, key=lambda i: (math.log(left[i]) + drawn[i], -i))
