"""Pages under speculation: every verify row has a real one, and all come back, however a request ends."""

from __future__ import annotations

import pytest

from tests.hosts.embedded_engine import (
    CHAIN,
    MAIN,
    Build,
    Sizes,
    Truths,
    assert_all_returned,
    greedy,
    num_free,
    prompts_of,
    run_to_end,
    tokens_of,
)
from tests.oracles.known_continuation import KnownContinuation
from trtllm_tree.engine.ports import DecodeBatch, DecodeWindow
from trtllm_tree.hosts.embedded.kv import DRAFT_GROUP


@pytest.mark.parametrize(("sizes", "page_size"), [(CHAIN, 16), (MAIN, 16), ((8, 3, 16), 64)], ids=str)
def test_the_pool_is_whole_after_200_short_requests(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes, page_size: int
) -> None:
    """The pool holds two to four of them at a time."""
    llm = build(sizes, tokens_per_block=page_size, max_seq_len=120, kv_cache_tokens=320)
    KnownContinuation(llm, truths, monkeypatch, hit_rate=0.9)
    before = num_free(llm.engine)
    prompts = prompts_of(truths)[:7]
    many = [prompts[index % 7] for index in range(200)]
    lengths = [1 + index * 5 % 9 for index in range(200)]
    outputs = llm.generate(many, [greedy(length) for length in lengths])
    assert [output.outputs[0].token_ids for output in outputs] == [
        truths[tuple(prompt)][:length] for prompt, length in zip(many, lengths, strict=True)
    ]
    assert_all_returned(llm, before)


def test_the_pool_is_whole_after_cancellations(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = build(MAIN, max_batch_size=3, max_num_tokens=9)
    KnownContinuation(llm, truths, monkeypatch)
    before = num_free(llm.engine)
    prompts = prompts_of(truths)

    # A stream that is closed early, while another request goes on.
    other = llm.engine.add_request(prompts[1], greedy())
    stream = llm.stream(prompts[0], greedy())
    next(stream)
    next(stream)
    stream.close()
    # One that prefills, and one that waits.
    third = llm.engine.add_request(prompts[2], greedy(20))
    prefilling = llm.engine.add_request(prompts[7], greedy())
    waiting = llm.engine.add_request(prompts[5], greedy())
    while not prefilling.committed_len:
        llm.engine.step()
    assert prefilling.is_prefilling and waiting.slot is None
    llm.engine.abort(prefilling)
    llm.engine.abort(waiting)
    # Their pages serve the next ones.
    late = [llm.engine.add_request(prompt, greedy(30)) for prompt in prompts[3:6]]
    run_to_end(llm.engine)
    assert other.output.token_ids == truths[tuple(prompts[1])]
    assert third.output.token_ids == truths[tuple(prompts[2])][:20]
    assert tokens_of(late) == [truths[tuple(prompt)][:30] for prompt in prompts[3:6]]
    assert_all_returned(llm, before)


@pytest.mark.parametrize("sizes", [CHAIN, (2, 3, 6), MAIN], ids=str)
def test_every_row_of_every_verify_window_has_a_slot_of_its_own_in_a_real_page(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    """Also in the last round before a limit, where the pages behind the window are not reserved."""
    llm = build(sizes)
    KnownContinuation(llm, truths, monkeypatch)
    open_window, windows = llm.engine.hook.open_window, []

    def checked(batch: DecodeBatch) -> DecodeWindow:
        for slots, group in zip(batch.write_slots, llm.engine.cache.groups, strict=True):
            assert int(slots.min()) >= group.page_size, "a row of the window is in the dummy page"
            assert len(set(slots.flatten().tolist())) == slots.numel(), "two rows share a slot"
        windows.append(batch)
        return open_window(batch)

    monkeypatch.setattr(llm.engine.hook, "open_window", checked)
    prompts = [prompts_of(truths)[index] for index in (0, 3, 6)]
    llm.generate(prompts * 6, [greedy(2 + index) for index in range(18)])
    assert len(windows) > 10


def test_the_target_and_the_draft_group_hold_the_same_requests(build: Build, truths: Truths) -> None:
    llm = build((2, 3, 6))
    assert [group.name for group in llm.engine.cache.groups][-1] == DRAFT_GROUP
    request = llm.engine.add_request(prompts_of(truths)[4], greedy(30))
    while request.finish_reason is None:
        llm.engine.step()
        counts = {int((group.page_table > 0).sum()) for group in llm.engine.cache.groups}
        assert len(counts) == 1
