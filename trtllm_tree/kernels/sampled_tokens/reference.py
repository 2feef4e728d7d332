"""sampled_tokens in torch: Philox in int64, kept ids by sorting. Greedy rows cost nothing but a maximum.

Legend: R rows that draw, V vocabulary, G groups of four ids, n sorted ids.
"""

from __future__ import annotations

import torch

_MASS_ONE = 2.0**40
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


def _words(groups: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Random words int64 [R, G, 4] of groups [R or 1, G] under seeds and positions [R]."""
    position = positions.unsqueeze(1)
    counter = (groups, position & _WORD, position >> 32 & _WORD, torch.zeros_like(position))
    return torch.stack(philox(*counter, seeds.unsqueeze(1)), dim=-1)


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)) float32 with u = (word + 1/2) / 2**32.

    The draw is decided where u is close to 1, so 1 - u is made from the word itself and not by subtraction.
    """
    upper = words >= 2**31
    distance = (torch.where(upper, _WORD - words, words).float() + 0.5) * 2.0**-32
    return torch.where(upper, -torch.log1p(-distance), -distance.log()).log().neg()


def _first_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` ids int64 [R, count] of float32 logits [R, V]: the largest first, ties by lower id."""
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    # Negative floats order backwards as integers: flip all but their sign.
    rank = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    # Distinct keys, so that the order of the few is that of a full sort, at a fraction of its time.
    later = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    keys = rank << 32 | later
    return (keys.topk(count, dim=1) if count < logits.shape[1] else keys.sort(dim=1, descending=True)).indices


def _kept(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Which of the sorted logits [R, n] are kept; parameters [R, 1]."""
    peak = logits[:, :1]
    mass = torch.where(logits == peak, 1.0, ((logits - peak) / temperatures).exp())
    in_top_k = torch.arange(logits.shape[1], device=logits.device) < top_ks
    mass = torch.where(in_top_k, mass * _MASS_ONE, 0.0).long()
    reached = mass.cumsum(dim=1)
    needed = (top_ps.double() * reached[:, -1:].double()).ceil().clamp(min=1).long()
    in_top_p = (reached - mass < needed) | (top_ps >= 1)
    cut = torch.where(min_ps > 0, peak + temperatures * min_ps.log(), -torch.inf)
    return in_top_k & in_top_p & (logits >= cut)


def _filtered_draw(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Tokens int64 [R] of rows of float32 logits [R, V] without NaN."""
    vocab = logits.shape[1]
    top_ks = torch.where(top_ks > 0, top_ks, vocab).clamp(max=vocab)
    ids = _first_ids(logits, int(top_ks.max()))
    logits = logits.gather(1, ids)
    temperatures, top_ks, top_ps, min_ps = (x.unsqueeze(1) for x in (temperatures, top_ks, top_ps, min_ps))
    kept = _kept(logits, temperatures, top_ks, top_ps, min_ps)
    # Noise is the dearest part: only as far as any row keeps something.
    count = int(kept.sum(dim=1).max())
    logits, ids, kept = logits[:, :count], ids[:, :count], kept[:, :count]
    words = _words(ids // 4, seeds, positions).gather(2, (ids % 4).unsqueeze(2)).squeeze(2)
    scores = (logits + temperatures * gumbel(words)).masked_fill(~kept, -torch.inf)
    # Not in id order: of equal scores the lowest id, and of nothing but -inf a kept one.
    best = kept & (scores == scores.max(dim=1, keepdim=True).values)
    return ids.masked_fill(~best, vocab).min(dim=1).values


def reference(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Fill `tokens` int32 [M]; arguments as in the op."""
    peak, best = logits.max(dim=-1)
    tokens.copy_(best.masked_fill(peak.isnan(), -1))
    vocab = logits.shape[1]
    is_filtered = (top_ks > 0) & (top_ks < vocab) | (top_ps < 1) | (min_ps > 0)
    draws = (temperatures > 0) & ~peak.isnan()
    rows = (draws & ~is_filtered).nonzero().squeeze(1)
    if len(rows):
        groups = torch.arange(-(-vocab // 4), device=logits.device).unsqueeze(0)
        words = _words(groups, seeds[rows], positions[rows]).flatten(1)[:, :vocab]
        scores = logits[rows].float() + temperatures[rows].unsqueeze(1) * gumbel(words)
        tokens[rows] = scores.argmax(dim=1).int()
    rows = (draws & is_filtered).nonzero().squeeze(1)
    if len(rows):
        parameters = (x[rows] for x in (seeds, positions, temperatures, top_ks, top_ps, min_ps))
        tokens[rows] = _filtered_draw(logits[rows].float(), *parameters).int()
