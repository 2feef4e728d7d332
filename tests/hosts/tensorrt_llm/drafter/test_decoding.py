"""Decoding with `TreeDrafter`: the tokens are plain decoding's, whatever comes and goes, and drafts are accepted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.builders import tiny_llama_dir
from tests.hosts.tensorrt_llm.drafter.flow import STEPS, Loop, Request, drafter_of, drafts_of, make_requests


@pytest.mark.parametrize("topk", [1, 4])
def test_tokens_are_those_of_plain_decoding_and_drafts_are_accepted(
    drafting: Any, tiny_target: Path, other: Path, plain: list[list[int]], topk: int
) -> None:
    requests = make_requests()
    loop = Loop(tiny_target, drafter_of(drafting, other, topk))
    loop.run(requests)
    assert [request.output for request in requests] == plain
    accepted = [kept for request in requests for kept in request.accepted]
    # Some are rejected, too: what a draft left behind is undone.
    assert sum(accepted) > 0 and 0 in accepted


def test_a_draft_model_equal_to_the_target_drafts_a_chain_that_is_always_accepted(
    newest: Any, tiny_target: Path, plain: list[list[int]]
) -> None:
    requests = make_requests()
    Loop(tiny_target, drafter_of(newest, tiny_target, 1)).run(requests)
    assert [request.output for request in requests] == plain
    for request in requests:
        assert request.accepted[:-1] == request.drafted[:-1] == [STEPS] * (len(request.drafted) - 1)


def test_a_tree_of_an_equal_draft_model_is_accepted_now_and_then(
    newest: Any, tiny_target: Path, plain: list[list[int]]
) -> None:
    requests = make_requests()
    Loop(tiny_target, drafter_of(newest, tiny_target, 4)).run(requests)
    assert [request.output for request in requests] == plain
    assert all(sum(request.accepted) > 0 for request in requests)


def test_more_requests_than_slots_all_finish_and_those_with_a_slot_draft(
    newest: Any, tiny_target: Path, plain: list[list[int]]
) -> None:
    requests = make_requests()
    Loop(tiny_target, drafter_of(newest, tiny_target, 1, max_batch_size=2)).run(requests, batch=3)
    assert [request.output for request in requests] == plain
    assert all(0 in r.drafted or sum(r.accepted) for r in requests)
    assert sum(sum(request.accepted) for request in requests) > 0


def test_ended_requests_give_their_slots_away_and_ids_may_come_again(
    newest: Any, tiny_target: Path, plain: list[list[int]]
) -> None:
    drafter = drafter_of(newest, tiny_target, 1, max_batch_size=4)
    for _ in range(2):
        requests = make_requests()
        # The same ids in another order: every slot holds another request's tokens.
        for request, number in zip(requests, (13, 12, 11, 10), strict=True):
            request.request_id = number
        Loop(tiny_target, drafter).run(requests)
        assert [request.output for request in requests] == plain
        assert all(set(request.drafted[:-1]) == set(request.accepted[:-1]) == {STEPS} for request in requests)


def test_a_request_that_cannot_be_drafted_for_is_decoded_plainly_and_alone(
    newest: Any, tiny_target: Path, tmp_path: Path, plain: list[list[int]]
) -> None:
    requests = make_requests()
    Loop(tiny_target, drafter_of(newest, tiny_target, 1, max_seq_len=45)).run(requests)
    assert [request.output for request in requests] == plain
    # The last has 66 prompt tokens; the third grows past 45 only at its end.
    assert not any(requests[3].drafted) and requests[2].drafted[0] == STEPS
    small = tiny_llama_dir(tmp_path, vocab_size=290)
    known, unknown = Request(1, [5, 6, 7], 3, 9), Request(2, [5, 295, 7], 3, 9)
    drafts = drafts_of(drafter_of(newest, small, 1), [unknown, known])
    assert drafts[0] == [] and len(drafts[1]) == STEPS


def test_no_more_is_drafted_than_was_reserved_or_is_still_wanted(newest: Any, tiny_target: Path) -> None:
    drafter = drafter_of(newest, tiny_target, 1)
    requests = [Request(i, [5, 6, 7], 3, 99) for i in range(4)]
    for request, reserved in zip(requests, (0, 2, 4, 4), strict=True):
        request.py_draft_tokens = [0] * reserved
    requests[3].py_max_new_tokens = 2
    drafter.prepare_draft_tokens(SimpleNamespace(context_requests=[], generation_requests=requests))
    assert [len(request.py_draft_tokens) for request in requests] == [0, 2, 4, 1]
