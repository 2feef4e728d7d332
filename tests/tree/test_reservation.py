"""Invariant I10: a decode step reserves the next verify window behind its own, up to the token limit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_tree.config.tree_rules import node_bounds
from trtllm_tree.tree.reservation import request_extent, round_extent


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """A legal (K, S, N)."""
    topk, steps = draw(st.integers(1, 8)), draw(st.integers(1, 10))
    low, high = node_bounds(topk, steps)
    return topk, steps, draw(st.integers(low, min(high, 80)))


lengths = st.integers(0, 10_000)
repeatable = settings(deadline=None, derandomize=True, database=None)


@repeatable
@given(shapes(), lengths, st.integers(1, 300))
def test_the_verify_window_always_has_its_slots(shape, committed, missing):
    _, _, nodes = shape
    for limit in (None, committed + missing):
        assert round_extent(committed, nodes, limit) >= committed + nodes


@repeatable
@given(shapes(), lengths, st.integers(1, 300), st.integers(1, 64))
def test_no_page_is_demanded_past_the_window_or_the_token_limit(shape, committed, missing, page):
    _, _, nodes = shape
    limit = committed + missing
    pages = -(-round_extent(committed, nodes, limit) // page)
    assert pages <= max(-(-(committed + nodes) // page), -(-limit // page))
    # Without a declared budget only the verify window was validated by admission.
    assert round_extent(committed, nodes, None) == committed + nodes


@repeatable
@given(shapes(), lengths, st.integers(1, 300), st.data())
def test_draft_writes_below_the_token_limit_have_slots(shape, committed, missing, data):
    topk, steps, nodes = shape
    limit = committed + missing
    accepted = data.draw(st.integers(1, min(steps + 1, nodes)))
    frontier = committed + accepted
    lanes = [frontier + (step - 1) * topk + lane for step in range(1, steps) for lane in range(topk)]
    chain = [frontier + step - 1 for step in range(1, steps)]
    extent = round_extent(committed, nodes, limit)
    assert all(slot < extent for slot in lanes + chain if slot < limit)


@repeatable
@given(st.integers(1, 12), st.integers(0, 20), st.integers(1, 12))
def test_admission_counts_exactly_the_largest_round_a_request_can_reach(nodes, prompt, max_tokens):
    limit = prompt + max_tokens
    # Prefill gives the first token, which is not in the cache yet. A round that starts with vc tokens in the
    # cache keeps 1 .. N more, and takes place while tokens are still missing.
    reachable, waiting = set(), [prompt]
    while waiting:
        committed = waiting.pop()
        generated = committed + 1 - prompt
        if generated >= max_tokens or committed in reachable:
            continue
        reachable.add(committed)
        waiting += [committed + kept for kept in range(1, nodes + 1)]
    extents = [round_extent(committed, nodes, limit) for committed in reachable]
    assert all(extent <= request_extent(nodes, limit) for extent in extents)
    if extents:
        assert max(extents) == request_extent(nodes, limit)
