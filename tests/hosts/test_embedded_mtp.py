"""Drafting with the target's own MTP layer on the embedded host: GLM-4-MoE's (grouped heads), DeepSeek-V3's (latent).

What is drafted is compared with `SlowMtp`: outputs alone would be right with any drafter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.conftest import PROMPT_LENGTHS
from tests.hosts.embedded_engine import (
    Build,
    Sizes,
    Truths,
    assert_all_returned,
    greedy,
    num_free,
    poison_pools,
    prompts_of,
    truths_of,
)
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from tests.oracles.mtp_loop import SlowMtp
from trtllm_tree import LLM, SpeculativeConfig

CHAIN: Sizes = (1, 3, 4)
TREE: Sizes = (4, 3, 12)
WIDE: Sizes = (3, 4, 20)


def _token_ids(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# Plain, chain and tree.


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("sizes", [CHAIN, (2, 3, 6), TREE, WIDE], ids=str)
def test_chains_and_trees_give_plain_decodings_tokens(
    make_mtp: Build,
    mtp_target: Path,
    mtp_truths: Truths,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes,
    page_size: int,
) -> None:
    """Eight prompts at once, prefilled in chunks; accepted paths are long and branch; unwritten KV rows are NaN."""
    llm = make_mtp(mtp_target, sizes, tokens_per_block=page_size, max_num_tokens=13)
    KnownContinuation(llm, mtp_truths, monkeypatch)
    log = RoundLog(llm)
    poison_pools(llm.engine)
    before = num_free(llm.engine)
    assert _token_ids(llm.generate(prompts_of(mtp_truths), greedy(40))) == list(mtp_truths.values())
    assert_all_returned(llm, before)

    # What the stress is for really happened.
    assert len({token for tokens in mtp_truths.values() for token in tokens}) > 40, "decoding does not wander"
    assert max(log.accept_lens) >= sizes[1] + 1
    assert any(len(set(lengths)) > 1 for _, lengths, _ in log.verified)
    assert log.has_moved_rows == (sizes[0] > 1)


@pytest.mark.parametrize("sizes", [CHAIN, TREE, WIDE], ids=str)
def test_its_own_drafts_change_no_token_and_are_accepted_where_they_are_right(
    make_mtp: Build,
    mtp_target: Path,
    mtp_truths: Truths,
    mtp_agreeing: Path,
    mtp_agreed: Truths,
    sizes: Sizes,
) -> None:
    for target_dir, expected, is_right in ((mtp_target, mtp_truths, False), (mtp_agreeing, mtp_agreed, True)):
        llm = make_mtp(target_dir, sizes)
        log = RoundLog(llm)
        outputs = llm.generate(prompts_of(expected), greedy(40))
        assert _token_ids(outputs) == list(expected.values())
        kept = sum(log.accept_lens) / len(log.accept_lens)
        assert kept > 1.3 if is_right else kept < 1.1
        if is_right:
            assert log.has_moved_rows == (sizes[0] > 1)


@pytest.mark.parametrize("sizes", [CHAIN, TREE], ids=str)
def test_seeded_sampling_draws_what_plain_decoding_draws(
    make_mtp: Build, mtp_agreeing: Path, mtp_agreed: Truths, sizes: Sizes
) -> None:
    prompts = prompts_of(mtp_agreed)
    params = [
        greedy(30, temperature=temperature, seed=100 + index, **more)
        for index, (temperature, more) in enumerate(
            [(0.3, {}), (0.7, {"top_p": 0.8}), (1.0, {"top_k": 20}), (0.7, {}), (1.5, {}), (0.0, {})]
        )
    ]
    prompts = prompts[: len(params)]
    plain = _token_ids(make_mtp(mtp_agreeing, None).generate(prompts, params))
    greedy_tokens = [mtp_agreed[tuple(prompt)][:30] for prompt in prompts]
    assert [a == b for a, b in zip(plain, greedy_tokens, strict=True)] == [False] * 5 + [True]
    llm = make_mtp(mtp_agreeing, sizes)
    log = RoundLog(llm)
    assert _token_ids(llm.generate(prompts, params)) == plain
    assert max(log.accept_lens) > 1


def test_rejection_keeps_greedy_requests_tokens_and_a_seeds_own(
    mtp_agreeing: Path, mtp_agreed: Truths, device: str
) -> None:
    topk, steps, nodes = TREE
    config = SpeculativeConfig(
        decoding_type="MTP",
        tree_topk=topk,
        num_steps=steps,
        num_nodes=nodes,
        use_rejection_sampling=True,
    )
    llm = LLM(str(mtp_agreeing), speculative_config=config, device=device, dtype="float32", max_seq_len=256)
    prompts = prompts_of(mtp_agreed)[:3]
    params = [greedy(20), greedy(20, temperature=0.8, seed=5), greedy(20, temperature=1.2, seed=6)]
    log = RoundLog(llm)
    together = _token_ids(llm.generate(prompts, params))
    assert together[0] == mtp_agreed[tuple(prompts[0])][:20]
    assert max(log.accept_lens) > 1
    assert [_token_ids([llm.generate(*pair)])[0] for pair in zip(prompts, params, strict=True)] == together


@pytest.mark.parametrize("sizes", [CHAIN, TREE], ids=str)
def test_fp8_rows_give_plain_decodings_tokens(
    make_mtp: Build, mtp_target: Path, mtp_truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    """On a CPU, where arithmetic stays float32: every reader sees the same rounded rows, the MTP layer's included."""
    options = {"device": "cpu", "kv_cache_dtype": "fp8"}
    rounded = truths_of(make_mtp(mtp_target, None, **options), PROMPT_LENGTHS, 40)
    assert rounded != mtp_truths, "FP8 changes nothing"
    llm = make_mtp(mtp_target, sizes, **options)
    pools = [pool for group in llm.engine.cache.groups for pool in group.pools.values()]
    assert {pool.dtype for pool in pools} == {torch.float8_e4m3fn}
    KnownContinuation(llm, rounded, monkeypatch)
    assert _token_ids(llm.generate(prompts_of(rounded), greedy(40))) == list(rounded.values())


# What is drafted.


def _sequences(log: RoundLog, prompt: list[int], tokens: list[int]) -> list[list[int]]:
    """What was known when each window of a request alone was drafted: the window's root is its last token."""
    ends = [1 + sum(log.accept_lens[:index]) for index in range(len(log.drafted))]
    return [prompt + tokens[:end] for end in ends if end <= len(tokens)]


@pytest.mark.parametrize("sizes", [CHAIN, TREE, WIDE, (4, 1, 5)], ids=str)
@pytest.mark.parametrize("is_right", [False, True], ids=["random", "agreeing"])
def test_windows_are_what_the_layer_drafts_over_whole_sequences(
    make_mtp: Build, mtp_target: Path, mtp_agreeing: Path, mtp_agreed: Truths, sizes: Sizes, is_right: bool
) -> None:
    """Behind a chunked prompt, and behind accepted paths of every length."""
    topk, steps, nodes = sizes
    target_dir = mtp_agreeing if is_right else mtp_target
    slow = SlowMtp(target_dir, topk)
    llm = make_mtp(target_dir, sizes, max_num_tokens=13)
    seen = []
    for prompt in prompts_of(mtp_agreed)[1:6:2]:
        log = RoundLog(llm)
        tokens = llm.generate(prompt, greedy(16)).outputs[0].token_ids
        sequences = _sequences(log, prompt, tokens)
        for sequence, (_, (drafted,), parents, scores) in zip(sequences, log.drafted, strict=False):
            if topk == 1:
                assert drafted == slow.chain(sequence, num_steps=steps)
                continue
            tree = slow.tree(sequence, num_steps=steps, num_nodes=nodes)
            assert (drafted, parents) == (tree.tokens, [tree.parents])
            assert scores is not None
            torch.testing.assert_close(scores[0].cpu(), torch.tensor(tree.scores), atol=1e-3, rtol=1e-4)
        seen += log.accept_lens[: len(sequences) - 1]
    assert len(seen) > 10
    assert not is_right or len(set(seen)) > 1


def test_a_request_drafts_the_same_trees_in_a_batch_and_alone(
    make_mtp: Build, mtp_agreeing: Path, mtp_agreed: Truths
) -> None:
    """Other requests, other slots, pages and chunks must not reach a request's drafts; accepted lengths differ."""
    prompts, lengths = [prompts_of(mtp_agreed)[index] for index in (2, 4, 6)], [12, 30, 21]
    llm = make_mtp(mtp_agreeing, TREE)
    alone = []
    for prompt, length in zip(prompts, lengths, strict=True):
        log = RoundLog(llm)
        tokens = llm.generate(prompt, greedy(length)).outputs[0].token_ids
        assert tokens == mtp_agreed[tuple(prompt)][:length]
        alone.append([(tokens, parents) for _, [tokens], [parents], _ in map(_with_parents, log.drafted)])
    llm = make_mtp(mtp_agreeing, TREE, max_num_tokens=11)
    log = RoundLog(llm)
    requests = [
        llm.engine.add_request(prompt, greedy(length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    together: list[list[Any]] = [[] for _ in requests]
    while llm.engine.has_work:
        seen = len(log.drafted)
        llm.engine.step()
        slots = {request.slot: index for index, request in enumerate(requests) if request.slot is not None}
        for batch_slots, tokens, parents, _ in map(_with_parents, log.drafted[seen:]):
            for row, slot in enumerate(batch_slots):
                if slot in slots:
                    together[slots[slot]].append((tokens[row], parents[row]))
    assert [request.output.token_ids for request in requests] == [
        mtp_agreed[tuple(prompt)][:length] for prompt, length in zip(prompts, lengths, strict=True)
    ]
    for mine, batched in zip(alone, together, strict=True):
        # The step that ends a request drafts once more, for nobody.
        assert len(batched) > 3 and mine[: len(batched)] == batched


def _with_parents(drafted: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    assert drafted[2] is not None, "a chain"
    return drafted


@pytest.mark.parametrize("sizes", [CHAIN, TREE], ids=str)
def test_what_was_in_the_pools_changes_nothing_that_is_drafted(
    make_mtp: Build, mtp_agreeing: Path, mtp_agreed: Truths, sizes: Sizes
) -> None:
    """NaN everywhere but in the dummy page, with the layer's own candidates."""
    logs = []
    for poison in (False, True):
        llm = make_mtp(mtp_agreeing, sizes)
        if poison:
            poison_pools(llm.engine)
        log = RoundLog(llm)
        llm.generate(prompts_of(mtp_agreed)[:4], greedy(14))
        logs.append([(slots, tokens, parents) for slots, tokens, parents, _ in log.drafted])
    assert logs[0] == logs[1]
