"""rejection_tokens in torch: all rows that draw at once, one sibling after the other, on whole rows of masses.

Legend: R rows that draw, N nodes, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch

from trtllm_tree.kernels._row_law_torch import (
    MASS_ONE,
    first_ids,
    gumbel,
    kept_of_sorted,
    masses,
    uniform,
    words,
)


def _target_masses(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids of float32 logits [R, V] are kept, and their masses int64, 0 for the others; parameters [R]."""
    vocab = logits.shape[1]
    kept = torch.ones_like(logits, dtype=torch.bool)
    column = [x.unsqueeze(1) for x in (temperatures, top_ks, top_ps, min_ps)]
    mass = masses(logits, logits.max(dim=1, keepdim=True).values, column[0])
    rows = ((top_ks > 0) & (top_ks < vocab) | (top_ps < 1) | (min_ps > 0)).nonzero().squeeze(1)
    if len(rows):
        temperature, top_k, top_p, min_p = (x[rows] for x in column)
        top_k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
        ids = first_ids(logits[rows], int(top_k.max()))
        kept_first, _ = kept_of_sorted(logits[rows].gather(1, ids), temperature, top_k, top_p, min_p)
        kept[rows] = torch.zeros_like(kept[rows]).scatter(1, ids, kept_first)
    return kept, mass.masked_fill(~kept, 0)


def _children(candidates: torch.Tensor, parents: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [R, C] of the children of rows [R], by rising id; -1 behind them."""
    num_nodes = parents.shape[1]
    node = torch.arange(num_nodes, device=parents.device)
    request, parent = rows // num_nodes, (rows % num_nodes).unsqueeze(1)
    is_child = (parents[request] == parent) & (node > parent)
    count = int(is_child.sum(dim=1).max())
    ids = torch.where(is_child, node, num_nodes).sort(dim=1).values[:, :count]
    tokens = torch.nn.functional.pad(candidates, (0, 1), value=-1)
    return tokens[request.unsqueeze(1), ids].long()


def _draft_masses(draft_probs: torch.Tensor | None, rows: torch.Tensor, vocab: int) -> torch.Tensor:
    """Masses int64 [R, V] of what drew the children of rows [R]; [R, 1] zeros where nothing did."""
    if draft_probs is None:
        return rows.new_zeros(len(rows), 1)
    mass = (draft_probs.flatten(0, 1)[rows] * MASS_ONE).long()
    return torch.nn.functional.pad(mass, (0, vocab - mass.shape[1]))


def _try_children(
    children: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The accepted children's tokens int64 [R], -1 where there is none, and what was left of the target's masses."""
    accepted = torch.full_like(seeds, -1)
    is_drawn = draft.any(dim=1)
    for sibling, token in enumerate(children.unbind(1)):
        at = token.clamp(0, target.shape[1] - 1).unsqueeze(1)
        total, wanted = target.sum(dim=1).double(), target.gather(1, at).squeeze(1).double()
        draft_at = at.clamp(max=draft.shape[1] - 1)
        offered = draft.gather(1, draft_at).squeeze(1).double()
        # From the draft's units to the target's, both as they are by now.
        scale = total / draft.sum(dim=1).clamp(min=1).double()
        is_open = (accepted < 0) & (token == at.squeeze(1)) & (~is_drawn | (offered > 0))
        bound = torch.where(is_drawn, scale * offered, total)
        left = (target - (scale.unsqueeze(1) * draft.double()).long()).clamp(min=0)
        left = torch.where(is_drawn.unsqueeze(1), left, target.scatter(1, at, 0))
        # Laws that are one but for rounding leave nothing.
        hit = (uniform(sibling, seeds, positions) * bound < wanted) | ~left.any(dim=1)
        accepted = torch.where(is_open & hit, token, accepted)
        missed = (is_open & ~hit).unsqueeze(1)
        target = torch.where(missed, left, target)
        draft = torch.where(missed & is_drawn.unsqueeze(1), draft.scatter(1, draft_at, 0), draft)
    return accepted, target


def reference(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    parents: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    draft_probs: torch.Tensor | None,
    tokens: torch.Tensor,
) -> None:
    """Fill `tokens` int32 [M]; arguments as in the op."""
    peak, best = logits.max(dim=-1)
    tokens.copy_(best.masked_fill(peak.isnan(), -1))
    rows = ((temperatures > 0) & ~peak.isnan()).nonzero().squeeze(1)
    if not len(rows):
        return
    vocab = logits.shape[1]
    values, temperatures = logits[rows].float(), temperatures[rows]
    seeds, positions = seeds[rows], positions[rows]
    kept, target = _target_masses(values, temperatures, top_ks[rows], top_ps[rows], min_ps[rows])
    children, draft = _children(candidates, parents, rows), _draft_masses(draft_probs, rows, vocab)
    accepted, left = _try_children(children, seeds, positions, target, draft)
    tokens[rows] = accepted.int()

    rest = (accepted < 0).nonzero().squeeze(1)
    groups = torch.arange(-(-vocab // 4), device=logits.device).unsqueeze(0)
    noise = gumbel(words(groups, seeds[rest], positions[rest]).flatten(1)[:, :vocab])
    scores = values[rest] + temperatures[rest].unsqueeze(1) * noise
    is_child = kept.new_zeros(len(rest), vocab + 1).scatter(
        1, children[rest].clamp(-1, vocab) % (vocab + 1), True
    )
    allowed = kept[rest] & ~is_child[:, :vocab]
    # Where children were drawn, what is left has a law that the logits do not tell.
    is_drawn = (draft.any(dim=1) & (children >= 0).any(dim=1))[rest].unsqueeze(1)
    scores = torch.where(is_drawn, left[rest].float().log() + noise, scores)
    allowed = torch.where(is_drawn, left[rest] > 0, allowed)
    scores = scores.masked_fill(~allowed, -torch.inf)
    # Of nothing but -inf an allowed one.
    best = allowed & (scores == scores.max(dim=1, keepdim=True).values)
    tokens[rows[rest]] = best.int().argmax(dim=1).int()
