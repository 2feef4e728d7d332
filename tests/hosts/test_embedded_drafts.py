"""What the head drafts, and NaN: neither other requests nor old pool contents reach a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.hosts.embedded_engine import (
    CHAIN,
    MAIN,
    Build,
    Sizes,
    Truths,
    assert_all_returned,
    greedy,
    num_free,
    poison_pools,
    prompts_of,
)
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from trtllm_tree import LLM
from trtllm_tree.engine.model_runner import ModelRunner
from trtllm_tree.engine.request import Request


def _drafted_by_request(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[torch.Tensor]]:
    """Per request the sorted node scores of every drafted tree."""
    log = RoundLog(llm)
    requests = [llm.engine.add_request(prompt, greedy(max_tokens)) for prompt in prompts]
    drafted: list[list[torch.Tensor]] = [[] for _ in requests]
    while llm.engine.has_work:
        seen = len(log.drafted)
        llm.engine.step()
        slots = {request.slot: index for index, request in enumerate(requests) if request.slot is not None}
        for batch_slots, _, _, scores in log.drafted[seen:]:
            assert scores is not None
            for row, slot in enumerate(batch_slots):
                if slot in slots:
                    drafted[slots[slot]].append(scores[row].sort().values.cpu())
    return drafted


def test_a_request_drafts_the_same_trees_in_a_batch_and_alone(build: Build, truths: Truths) -> None:
    """Other requests, other slots, pages and chunks must not reach a request's draft attention."""
    prompts = [prompts_of(truths)[index] for index in (2, 4, 6)]
    llm = build(MAIN)
    together = _drafted_by_request(build(MAIN, max_num_tokens=11), prompts, 12)
    for prompt, scores in zip(prompts, together, strict=True):
        [alone] = _drafted_by_request(llm, [prompt], 12)
        assert len(alone) == len(scores) > 5
        torch.testing.assert_close(torch.stack(scores), torch.stack(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_what_was_in_the_pools_changes_nothing_that_is_drafted(
    build: Build, truths: Truths, sizes: Sizes
) -> None:
    """NaN everywhere but in the dummy page, with the head's own candidates, up to the token limit."""
    logs = []
    for poison in (False, True):
        llm = build(sizes)
        if poison:
            poison_pools(llm.engine)
        log = RoundLog(llm)
        llm.generate(prompts_of(truths)[:4], greedy(14))
        logs.append([(slots, tokens, parents) for slots, tokens, parents, _ in log.drafted])
    assert logs[0] == logs[1]


@pytest.mark.parametrize("first_row", [0, 1])
def test_logits_that_turn_nan_end_one_request_behind_its_last_good_token(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, first_row: int
) -> None:
    """The second request's windows are NaN from the third on, with `first_row` 1 but for their root's row.

    Then a window that keeps the root alone is still good.
    """
    llm = build(MAIN)
    KnownContinuation(llm, truths, monkeypatch, hit_rate=1.0)
    log = RoundLog(llm)
    forward, windows = ModelRunner.forward, []

    def poisoned(self: ModelRunner, batch: Any, *args: Any) -> torch.Tensor:
        logits = forward(self, batch, *args)
        if batch.logit_rows is None:
            windows.append(batch)
            batch_size = logits.shape[0] // MAIN[2]
            if len(windows) >= 3 and batch_size == 3:
                logits.view(batch_size, MAIN[2], -1)[1, first_row:].fill_(torch.nan)
        return logits

    monkeypatch.setattr(ModelRunner, "forward", poisoned)
    before = num_free(llm.engine)
    prompts = prompts_of(truths)[:3]
    first, bad, last = llm.generate(prompts, greedy())
    accepted = [lengths[1] for _, lengths, _ in log.verified if len(lengths) == 3][:-1]
    assert len(accepted) >= 2
    kept = 1 + sum(accepted) + first_row
    assert bad.error is not None and bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == truths[tuple(prompts[1])][:kept]
    assert bad.acceptance.accept_lens == [*accepted, first_row]
    assert bad.acceptance.num_accepted_drafts == sum(accepted) - len(accepted)
    assert first.outputs[0].token_ids == truths[tuple(prompts[0])]
    assert last.outputs[0].token_ids == truths[tuple(prompts[2])]
    assert_all_returned(llm, before)


@pytest.mark.parametrize("sizes", [CHAIN, (2, 3, 6), MAIN], ids=str)
def test_draft_logits_that_are_nan_cost_acceptance_alone(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    """The middle request's candidates are garbage in every step; its tokens and its neighbours' drafts are not."""
    prompts = prompts_of(truths)[1:4]
    logs = []
    for poison in (False, True):
        llm = build(sizes)
        assert llm.spec_round is not None
        model = llm.spec_round.drafter._model
        logits = model.logits

        def poisoned(
            hidden: torch.Tensor,
            logits: Callable[..., torch.Tensor] = logits,
            running: list[Request] = llm.engine._scheduler.running,
        ) -> torch.Tensor:
            out = logits(hidden)
            # Requests end when a draft happens to be right, and not all in the same step.
            if len(running) == len(prompts):
                out.view(len(prompts), -1, out.shape[-1])[1].fill_(torch.nan)
            return out

        if poison:
            monkeypatch.setattr(model, "logits", poisoned)
        log = RoundLog(llm)
        outputs = llm.generate(prompts, greedy(10))
        assert [o.outputs[0].token_ids for o in outputs] == [truths[tuple(p)][:10] for p in prompts]
        logs.append([drafted for drafted in log.drafted if len(drafted[1]) == len(prompts)])
    clean, poisoned_log = logs
    assert min(map(len, logs)) > 3
    for before, after in zip(clean, poisoned_log, strict=False):
        for index in (1, 2):  # tokens and parents
            assert before[index] is None or [before[index][row] for row in (0, 2)] == [
                after[index][row] for row in (0, 2)
            ]
    assert clean[0][1][1] != poisoned_log[0][1][1]
