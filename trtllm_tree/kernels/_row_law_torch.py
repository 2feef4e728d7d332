"""The law of a row's next token in torch: what all references that draw share. See `_row_law`.

Legend: R rows, V vocabulary, G groups of four ids, n sorted ids.
"""

from __future__ import annotations

import torch

MASS_ONE = 2.0**40
_WORD = 0xFFFFFFFF


def philox(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10: four words from a counter of four, all in int64 tensors; `key` int64, its low half first."""
    k0, k1 = key & _WORD, key >> 32 & _WORD
    for _ in range(10):
        # A product may wrap to a negative number; its 64 bits are right.
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (high >> 32 & _WORD) ^ c1 ^ k0, high & _WORD
        c2, c3 = (low >> 32 & _WORD) ^ c3 ^ k1, low & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


def words(groups: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Random words int64 [R, G, 4] of groups [R or 1, G] under seeds and positions [R]."""
    position = positions.unsqueeze(1)
    counter = (groups, position & _WORD, position >> 32 & _WORD, torch.zeros_like(position))
    return torch.stack(philox(*counter, seeds.unsqueeze(1)), dim=-1)


def uniform(index: int, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The `index`-th number float64 [R] in (0, 1) under seeds and positions [R]; ids' noise has other counters."""
    one = torch.ones_like(positions)
    first, second, _, _ = philox(one * index, positions & _WORD, positions >> 32 & _WORD, one, seeds)
    return ((first << 20 | second >> 12).double() + 0.5) * 2.0**-52


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)) float32 with u = (word + 1/2) / 2**32.

    The draw is decided where u is close to 1, so 1 - u is made from the word itself and not by subtraction.
    """
    upper = words >= 2**31
    distance = (torch.where(upper, _WORD - words, words).float() + 0.5) * 2.0**-32
    return torch.where(upper, -torch.log1p(-distance), -distance.log()).log().neg()


def first_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` ids int64 [R, count] of float32 logits [R, V]: the largest first, ties by lower id."""
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    # Negative floats order backwards as integers: flip all but their sign.
    rank = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    # Distinct keys, so that the order of the few is that of a full sort, at a fraction of its time.
    later = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    keys = rank << 32 | later
    return (keys.topk(count, dim=1) if count < logits.shape[1] else keys.sort(dim=1, descending=True)).indices


def masses(logits: torch.Tensor, peak: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Probabilities int64 [R, n] of logits [R, n], in units of 2**-40 of the peak's; peak and temperatures [R, 1]."""
    mass = torch.where(logits == peak, 1.0, ((logits - peak) / temperatures).exp())
    return (mass * MASS_ONE).long()


def kept_of_sorted(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the sorted logits [R, n] are kept, and the masses int64 of the first top_k; parameters [R, 1]."""
    peak = logits[:, :1]
    in_top_k = torch.arange(logits.shape[1], device=logits.device) < top_ks
    mass = masses(logits, peak, temperatures).masked_fill(~in_top_k, 0)
    reached = mass.cumsum(dim=1)
    needed = (top_ps.double() * reached[:, -1:].double()).ceil().clamp(min=1).long()
    in_top_p = (reached - mass < needed) | (top_ps >= 1)
    cut = torch.where(min_ps > 0, peak + temperatures * min_ps.log(), -torch.inf)
    return in_top_k & in_top_p & (logits >= cut), mass
