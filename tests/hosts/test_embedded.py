"""Speculation on the embedded host: whatever is drafted, the tokens are plain decoding's.

The heads here are random, so most tests put `KnownContinuation` in the scorer's place: accepted paths are
then long and branching.
"""

from __future__ import annotations

from pathlib import Path
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
    run_to_end,
    tokens_of,
)
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from trtllm_tree import LLM, SpeculativeConfig
from trtllm_tree.engine.model_runner import ModelRunner
from trtllm_tree.tree.draft_tree import DraftTree
from trtllm_tree.tree.future import FutureParentMap
from trtllm_tree.tree.lanes import TreeDraftInputs
from trtllm_tree.tree.spec import TreeSpec
from trtllm_tree.tree.verify_batch import TreeVerifyBatch

SHAPES: list[Sizes] = [
    CHAIN,
    MAIN,
    (2, 3, 6),
    (3, 4, 20),
    (8, 3, 16),
    (4, 1, 5),  # one draft step
    (3, 1, 2),  # one draft step, one draft token
    (2, 2, 2),  # fewer nodes than a path could have
    (3, 2, 13),  # every candidate is a node
    (2, 10, 18),  # as few nodes as lanes write
    (4, 5, 64),  # a full mask word
    (5, 4, 65),  # one node more
    (16, 2, 17),
]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_every_shape_gives_plain_decodings_tokens(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    llm = build(sizes)
    KnownContinuation(llm, truths, monkeypatch)
    log = RoundLog(llm)
    poison_pools(llm.engine)
    before = num_free(llm.engine)
    outputs = llm.generate(prompts_of(truths), greedy())
    assert [output.outputs[0].token_ids for output in outputs] == list(truths.values())
    assert num_free(llm.engine) == before

    # What the stress is for really happened.
    topk, steps, nodes = sizes
    assert max(log.accept_lens) >= min(steps + 1, nodes, 5)
    assert any(len(set(lengths)) > 1 for _, lengths, _ in log.verified)
    assert log.has_moved_rows == (topk > 1 and nodes > 2)


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_page_size_and_chunked_prefill_change_no_token(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes, page_size: int
) -> None:
    llm = build(sizes, tokens_per_block=page_size, max_num_tokens=13)
    KnownContinuation(llm, truths, monkeypatch)
    poison_pools(llm.engine)
    outputs = llm.generate(prompts_of(truths), greedy(40))
    assert [output.outputs[0].token_ids for output in outputs] == [t[:40] for t in truths.values()]


@pytest.mark.parametrize("sizes", [CHAIN, (3, 4, 20)], ids=str)
def test_requests_that_come_and_go_equal_their_runs_alone(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    llm = build(sizes)
    KnownContinuation(llm, truths, monkeypatch)
    lengths = [7, 60, 3, 33, 1, 48, 21, 11]
    alone = [
        llm.generate(prompt, greedy(length)).outputs[0].token_ids
        for prompt, length in zip(prompts_of(truths), lengths, strict=True)
    ]
    assert alone == [tokens[:n] for tokens, n in zip(truths.values(), lengths, strict=True)]
    log = RoundLog(llm)
    requests = []
    for prompt, length in zip(prompts_of(truths), lengths, strict=True):
        requests.append(llm.engine.add_request(prompt, greedy(length)))
        llm.engine.step()
        llm.engine.step()
    run_to_end(llm.engine)
    assert tokens_of(requests) == alone
    assert {len(slots) for slots, _, _ in log.verified} >= {1, 2, 3}


@pytest.mark.parametrize("sizes", [(2, 3, 6), (4, 5, 32), (8, 3, 16)], ids=str)
def test_windows_wider_than_a_path_keep_the_requests_of_a_batch_apart(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    """N > S + 1, B > 1, and accept lengths that differ in nearly every round; buffers start as garbage."""
    llm = build(sizes, max_batch_size=4)
    assert llm.spec_round is not None
    for owner in (llm.spec_round, llm.spec_round.sampler, llm.spec_round.drafter):
        for name, buffer in vars(owner).items():
            if name in (
                "_tokens",
                "_positions",
                "_predict",
                "_accept_len",
                "_path",
                "_step0_tokens",
                "_frontier",
            ):
                buffer.fill_(97)
    KnownContinuation(llm, truths, monkeypatch)
    log = RoundLog(llm)
    prompts = prompts_of(truths)[:6]
    outputs = llm.generate(prompts, greedy())
    assert [output.outputs[0].token_ids for output in outputs] == [truths[tuple(p)] for p in prompts]
    unequal = [len(set(lengths)) > 1 for _, lengths, _ in log.verified if len(lengths) > 1]
    assert sum(unequal) > len(unequal) // 2


@pytest.mark.parametrize("sizes", [CHAIN, (2, 3, 6), MAIN], ids=str)
def test_a_random_head_changes_no_token(build: Build, truths: Truths, sizes: Sizes) -> None:
    llm = build(sizes)
    prompts = prompts_of(truths)
    outputs = llm.generate(prompts, greedy(20))
    assert [output.outputs[0].token_ids for output in outputs] == [t[:20] for t in truths.values()]


@pytest.mark.parametrize("sizes", [CHAIN, (4, 5, 32)], ids=str)
def test_every_token_limit_is_met_exactly(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    """From 1 to a window and more."""
    prompt = prompts_of(truths)[3]
    llm = build(sizes)
    before = num_free(llm.engine)
    KnownContinuation(llm, truths, monkeypatch)
    limits = list(range(1, sizes[2] + 4))
    outputs = llm.generate([prompt] * len(limits), [greedy(limit) for limit in limits])
    for limit, output in zip(limits, outputs, strict=True):
        assert output.outputs[0].token_ids == truths[tuple(prompt)][:limit]
        assert output.outputs[0].finish_reason == "length"
        assert sum(output.acceptance.accept_lens) == limit - 1
    assert_all_returned(llm, before)


@pytest.mark.parametrize("sizes", [CHAIN, (4, 5, 32)], ids=str)
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 16, 33])
def test_a_request_fills_the_smallest_pool_and_context_that_admit_it(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes, max_tokens: int
) -> None:
    prompt = prompts_of(truths)[4]
    limit = len(prompt) + max_tokens
    extent = max(limit, limit - 2 + sizes[2])
    pool = -(-extent // 16) * 16
    llm = build(sizes, max_seq_len=limit, kv_cache_tokens=pool, max_batch_size=2)
    KnownContinuation(llm, truths, monkeypatch)
    outputs = llm.generate([prompt, prompt], greedy(max_tokens))
    assert [o.outputs[0].token_ids for o in outputs] == [truths[tuple(prompt)][:max_tokens]] * 2
    if pool > 16:
        smaller = build(sizes, max_seq_len=limit, kv_cache_tokens=pool - 16)
        refused = smaller.generate([prompt], greedy(max_tokens))[0]
        assert refused.error is not None and "KV pool" in str(refused.error)


# One chain path.


def _forbid_tree_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: object, *_: object, **__: object) -> None:
        raise AssertionError(f"{type(self).__name__} was built")

    for kind in (TreeSpec, DraftTree, TreeDraftInputs, FutureParentMap, TreeVerifyBatch):
        monkeypatch.setattr(kind, "__init__", forbidden)


def _logits_and_tokens(
    llm: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.Tensor], list[list[int]]]:
    forward, logits = ModelRunner.forward, []

    def recorded(self: ModelRunner, *args: Any) -> torch.Tensor:
        logits.append(forward(self, *args))
        return logits[-1]

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", recorded)
        outputs = llm.generate(prompts, greedy(30))
    return logits, [output.outputs[0].token_ids for output in outputs]


def test_topk_1_with_the_tree_flag_is_the_chain_bit_for_bit_and_builds_no_tree_state(
    tiny_target: Path, tiny_head: Path, device: str, truths: Truths, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"decoding_type": "Eagle3", "speculative_model": str(tiny_head), "max_draft_len": 4}
    flagged = SpeculativeConfig.from_trtllm(common | {"use_dynamic_tree": True, "dynamic_tree_max_topK": 1})
    unflagged = SpeculativeConfig.from_trtllm(common)
    _forbid_tree_state(monkeypatch)
    runs = []
    for config in (flagged, unflagged):
        llm = LLM(
            str(tiny_target), speculative_config=config, device=device, max_seq_len=128, cuda_graphs=False
        )
        KnownContinuation(llm, truths, monkeypatch)
        log = RoundLog(llm)
        runs.append((*_logits_and_tokens(llm, prompts_of(truths)[:4], monkeypatch), log))
        assert llm.spec_round is not None and llm.spec_round.tree is None
    (logits, tokens, log), (other_logits, other_tokens, other_log) = runs
    assert tokens == other_tokens == [t[:30] for t in list(truths.values())[:4]]
    assert len(logits) == len(other_logits)
    assert all(torch.equal(a, b) for a, b in zip(logits, other_logits, strict=True))
    assert log.drafted == other_log.drafted and log.verified == other_log.verified
    assert max(log.accept_lens) == 5


@pytest.mark.parametrize("sizes", [(2, 3, 6)], ids=str)
def test_a_tree_does_build_what_a_chain_must_not(
    build: Build, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    _forbid_tree_state(monkeypatch)
    with pytest.raises(AssertionError, match="was built"):
        build(sizes)
