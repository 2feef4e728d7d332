"""Torch reference of `logprob_topk`: k times the first largest logit. It shares nothing with the kernels."""

from __future__ import annotations

import math

import torch


def reference(
    logits: torch.Tensor, *, d2t: torch.Tensor | None, scores: torch.Tensor, ids: torch.Tensor
) -> None:
    """Fill `scores` and `ids`; arguments as in the op."""
    values = logits.float()
    # float64 leaves room below every float32 for "already taken".
    remaining = torch.where(values.isnan(), float("-inf"), values).double().clamp(min=-1e300)
    picks = []
    for _ in range(scores.shape[1]):
        # argmax returns the first of equal elements.
        picks.append(remaining.argmax(-1, keepdim=True))
        remaining.scatter_(1, picks[-1], float("-inf"))
    best = torch.cat(picks, dim=1)

    log_total = values.logsumexp(-1, keepdim=True)
    # A row with +inf has no log-probabilities; one of nothing but -inf scores -inf.
    log_total = log_total.nan_to_num(nan=math.nan, posinf=math.nan, neginf=0.0)
    scores.copy_(values.gather(1, best) - log_total)
    ids.copy_(best if d2t is None else best + d2t[best])
