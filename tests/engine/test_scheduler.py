"""Admission by promised pages, chunked prefill, and turns between prefill and decode; no model runs here."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.engine.kv_cache import CacheGroup, GroupSpec, KVCache, LayerSpec
from trtllm_tree.engine.output import OutputText
from trtllm_tree.engine.ports import Segment
from trtllm_tree.engine.request import Request
from trtllm_tree.engine.scheduler import Scheduler

_IDS = count()


def _cache(*groups: tuple[int, int], num_slots: int = 9) -> KVCache:
    """A cache with groups of (usable pages, page size)."""
    return KVCache(
        [
            CacheGroup(
                GroupSpec(f"group{index}", {f"layer{index}": LayerSpec(1, 1)}),
                num_pages=num_pages + 1,
                page_size=page_size,
                num_slots=num_slots,
                max_pages=num_pages,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
            for index, (num_pages, page_size) in enumerate(groups)
        ]
    )


def _request(prompt_len: int = 4, max_tokens: int = 8) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    first = 1000 * next(_IDS)
    return Request(first, list(range(first, first + prompt_len)), params, OutputText(None, params, []))


def _scheduler(cache: KVCache, max_batch_size: int = 8, max_num_tokens: int = 64) -> Scheduler:
    return Scheduler(cache, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)


def test_admission_counts_promised_pages_not_pages_in_use() -> None:
    cache = _cache((10, 16))
    scheduler = _scheduler(cache)
    first, second = _request(), _request()
    scheduler.add(first, 6 * 16)
    scheduler.add(second, 5 * 16)
    assert scheduler.admit() == [first]
    # Nothing is allocated yet: the second would fit now, and starve the first later.
    assert cache.groups[0].allocator.num_free == 10
    assert scheduler.admit() == []
    scheduler.finish(first)
    assert scheduler.admit() == [second]


def test_promises_fill_the_pool_to_its_last_page() -> None:
    scheduler = _scheduler(_cache((10, 16)))
    requests = [_request() for _ in range(3)]
    for request, extent in zip(requests, (6 * 16, 3 * 16 + 1, 1), strict=True):
        scheduler.add(request, extent)
    assert scheduler.admit() == requests[:2]


def test_the_tightest_group_decides() -> None:
    scheduler = _scheduler(_cache((10, 16), (2, 64)))
    requests = [_request() for _ in range(3)]
    for request in requests:
        scheduler.add(request, 40)
    assert scheduler.admit() == requests[:2]
    scheduler.finish(requests[1])
    assert scheduler.admit() == requests[2:]


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    scheduler = _scheduler(_cache((10, 16)))
    running, large, small = _request(), _request(), _request()
    for request, extent in ((running, 16), (large, 160), (small, 16)):
        scheduler.add(request, extent)
    assert scheduler.admit() == [running]
    assert [entry[0] for entry in scheduler.waiting] == [large, small]
    scheduler.finish(running)
    assert scheduler.admit() == [large]
    scheduler.finish(large)
    assert scheduler.admit() == [small]


def test_running_requests_have_distinct_slots_below_the_batch_size() -> None:
    scheduler = _scheduler(_cache((10, 16)), max_batch_size=3)
    requests = [_request() for _ in range(5)]
    for request in requests:
        scheduler.add(request, 16)
    assert scheduler.admit() == requests[:3]
    assert {request.slot for request in requests[:3]} == {0, 1, 2}
    freed = requests[1].slot
    scheduler.finish(requests[1])
    assert requests[1].slot is None
    assert scheduler.admit() == [requests[3]]
    assert requests[3].slot == freed


def test_fits_means_an_empty_pool_would_do() -> None:
    scheduler = _scheduler(_cache((10, 16), (3, 64)))
    assert scheduler.fits(160)
    assert not scheduler.fits(161)
    assert not _scheduler(_cache((10, 16), (2, 64))).fits(129)


def test_finish_gives_back_slot_pages_and_promise() -> None:
    cache = _cache((10, 16), (3, 64))
    scheduler = _scheduler(cache, max_batch_size=1)
    for _ in range(20):
        request = _request()
        scheduler.add(request, 150)
        assert scheduler.admit() == [request]
        assert request.slot is not None
        cache.reserve(request.slot, 100)
        scheduler.finish(request)
        assert [group.allocator.num_free for group in cache.groups] == [10, 3]
    assert not scheduler.running and not scheduler.waiting


def test_finishing_a_waiting_request_removes_it_alone() -> None:
    scheduler = _scheduler(_cache((10, 16)), max_batch_size=1)
    requests = [_request() for _ in range(4)]
    for request in requests:
        scheduler.add(request, 16)
    scheduler.admit()
    scheduler.finish(requests[2])
    scheduler.finish(requests[0])
    order = []
    while started := scheduler.admit():
        order += started
        scheduler.finish(started[0])
    assert order == [requests[1], requests[3]]


def _prefill_step(scheduler: Scheduler) -> list[tuple[Request, Segment]]:
    plan = scheduler.next_prefill()
    for request, segment in plan:
        request.committed_len = segment.end
    return plan


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 40))
def test_chunks_cover_every_prompt_exactly_once(lengths: list[int], max_num_tokens: int) -> None:
    scheduler = _scheduler(_cache((60, 16)), max_num_tokens=max_num_tokens)
    requests = [_request(prompt_len=length) for length in lengths]
    for request in requests:
        scheduler.add(request, 48)
    scheduler.admit()
    covered: dict[int, list[int]] = {request.request_id: [] for request in requests}
    ended = []
    while any(request.is_prefilling for request in requests):
        plan = _prefill_step(scheduler)
        if not plan:  # decode's turn
            continue
        rows = [row for _, segment in plan for row in range(segment.row, segment.row + segment.length)]
        assert rows == list(range(len(rows))) and len(rows) <= max_num_tokens
        left = sum(len(request.prompt_ids) - len(covered[request.request_id]) for request in requests)
        assert len(rows) == min(max_num_tokens, left), "a chunk leaves rows unused while prompts wait"
        for request, segment in plan:
            assert segment.slot == request.slot
            assert segment.start == len(covered[request.request_id])
            covered[request.request_id] += segment.token_ids
            assert segment.end == len(covered[request.request_id])
            followers = [*request.prompt_ids[segment.start + 1 : segment.end + 1]]
            assert segment.is_last == (segment.end == len(request.prompt_ids))
            assert list(segment.next_tokens) == followers + ([-1] if segment.is_last else [])
            ended += [request] if segment.is_last else []
    assert covered == {request.request_id: request.prompt_ids for request in requests}
    assert ended == requests


def test_a_long_prompt_and_running_requests_take_turns() -> None:
    scheduler = _scheduler(_cache((60, 16)), max_num_tokens=4)
    running, long = _request(prompt_len=4), _request(prompt_len=20)
    scheduler.add(running, 16)
    scheduler.admit()
    assert [request for request, _ in _prefill_step(scheduler)] == [running]
    scheduler.add(long, 48)
    scheduler.admit()
    turns = []
    while long.is_prefilling:
        plan = _prefill_step(scheduler)
        assert [request for request, _ in plan] in ([], [long])
        assert scheduler.decoding()[:1] == [running]
        turns.append("prefill" if plan else "decode")
    assert turns == ["decode", "prefill"] * 5
    assert scheduler.next_prefill() == []
    assert scheduler.decoding() == [running, long]


def test_an_endless_queue_of_prompts_never_stops_decoding() -> None:
    scheduler = _scheduler(_cache((100, 16)), max_batch_size=3, max_num_tokens=4)
    first = _request(prompt_len=4)
    scheduler.add(first, 16)
    decode_turns = 0
    for _ in range(40):
        while len(scheduler.waiting) < 2:
            scheduler.add(_request(prompt_len=6), 16)
        scheduler.admit()
        if not _prefill_step(scheduler):
            decode_turns += first in scheduler.decoding()
            for request in scheduler.decoding():
                if request is not first:
                    scheduler.finish(request)
    assert decode_turns >= 19


def test_prompts_prefill_back_to_back_while_nothing_decodes() -> None:
    scheduler = _scheduler(_cache((60, 16)), max_num_tokens=4)
    long = _request(prompt_len=17)
    scheduler.add(long, 48)
    scheduler.admit()
    lengths = []
    while long.is_prefilling:
        lengths.append(sum(segment.length for _, segment in _prefill_step(scheduler)))
    assert lengths == [4, 4, 4, 4, 1]


@pytest.mark.parametrize("max_num_tokens", [1, 3, 64])
def test_requests_still_prefilling_do_not_decode(max_num_tokens: int) -> None:
    scheduler = _scheduler(_cache((60, 16)), max_num_tokens=max_num_tokens)
    requests = [_request(prompt_len=length) for length in (2, 5)]
    for request in requests:
        scheduler.add(request, 16)
    scheduler.admit()
    assert scheduler.decoding() == []
    while any(request.is_prefilling for request in requests):
        _prefill_step(scheduler)
        assert scheduler.decoding() == [r for r in requests if r.committed_len == len(r.prompt_ids)]
