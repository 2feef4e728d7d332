"""The seeded draw of one row in plain Python, from the definitions: integers without width, float64, one sort."""

from __future__ import annotations

import math

_WORD = 2**32


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    (a, b, c, d), (j, k) = counter, key
    for _ in range(10):
        ab, cd = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = cd // _WORD ^ b ^ j, cd % _WORD, ab // _WORD ^ d ^ k, ab % _WORD
        j, k = (j + 0x9E3779B9) % _WORD, (k + 0xBB67AE85) % _WORD
    return a, b, c, d


def gumbel(word: int) -> float:
    """The noise that a random word stands for."""
    # 1 - (word + 1/2) / 2**32, exact.
    distance = (_WORD - 1 - word + 0.5) / _WORD
    return -math.log(-math.log1p(-distance))


def noise(vocab: int, seed: int, position: int) -> list[float]:
    """The noise of each id."""
    seed, position = seed % 2**64, position % 2**64
    words: list[int] = []
    for group in range(-(-vocab // 4)):
        counter = (group, position % _WORD, position // _WORD, 0)
        words += philox(counter, (seed % _WORD, seed // _WORD))
    return [gumbel(word) for word in words[:vocab]]


def law(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Probabilities of the kept ids of a row with finite logits at its top; temperature > 0."""
    ids = sorted(range(len(row)), key=lambda i: (-row[i], i))
    ids = ids[:top_k] if top_k > 0 else ids
    peak = row[ids[0]]
    weights = {i: 1.0 if row[i] == peak else math.exp((row[i] - peak) / temperature) for i in ids}
    needed, behind = top_p * sum(weights.values()), 0.0
    kept = []
    for i in ids:
        if kept and behind >= needed and top_p < 1:
            break
        kept.append(i)
        behind += weights[i]
    kept = [i for i in kept if weights[i] >= min_p]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


def seeded_draw(
    row: list[float],
    seed: int,
    position: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> int:
    """The token of one row."""
    if any(math.isnan(value) for value in row):
        return -1
    if temperature == 0:
        return max(range(len(row)), key=lambda i: (row[i], -i))
    drawn = noise(len(row), seed, position)
    kept = law(row, temperature, top_k, top_p, min_p)
    return max(kept, key=lambda i: (row[i] + temperature * drawn[i], -i))
