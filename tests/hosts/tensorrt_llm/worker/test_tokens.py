"""The worker over the runtime double: tokens and drafts are the embedded host's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hosts.tensorrt_llm.tree_runs import (
    MAIN,
    Sizes,
    embedded_tokens,
    prompts_of,
    sampling_config,
    tree_double,
    tree_executor,
)
from tests.hosts.tensorrt_llm.worker.checks import (
    SAMPLED,
    assert_drafted_for_alike_in_company,
    assert_rounds_are_the_embedded_hosts,
    sampled_configs,
)
from tests.hosts.tensorrt_llm.worker.runs import PROMPTS, TOKENS, Pair, Rounds, run
from trtllm_tree import SamplingParams
from trtllm_tree.demo import resolve_head, resolve_target


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokens_per_block": 32, "kv_manager": "v2", "separate": True},
        {"tokens_per_block": 64, "overlap": True, "graph_batch_sizes": [1, 3]},
        {"rope_fusion": False, "overlap": True, "separate": True},
    ],
    ids=["plain", "v2 pages of 32", "overlap pages of 64", "unfused"],
)
def test_greedy_tokens_are_those_of_the_embedded_host(
    layout: str, pair: Pair, expected: list[list[int]], options: dict[str, Any]
) -> None:
    executor = tree_executor(*pair, max_batch_size=3, **options)
    requests = run(executor, PROMPTS)
    assert [request.generated for request in requests] == expected
    kept = [count for request in requests for count in request.accepted_history]
    assert max(kept) >= 3 and 0 in kept, "the drafts of this pair are neither always right nor always wrong"


@pytest.mark.parametrize(
    "options", [{}, {"separate": True, "rope_fusion": False}], ids=["shared", "separate"]
)
def test_every_round_drafts_and_keeps_what_the_embedded_host_does(
    layout: str, pair: Pair, options: dict[str, Any]
) -> None:
    assert_rounds_are_the_embedded_hosts(*pair, **options)


def test_a_request_is_drafted_for_alike_alone_and_beside_prompts_that_arrive(
    new_layout: None, pair: Pair
) -> None:
    assert_drafted_for_alike_in_company(*pair)


@pytest.mark.parametrize("sizes", [(2, 3, 6), (8, 2, 17), (3, 1, 4)], ids=str)
def test_other_trees_generate_the_same(
    new_layout: None, pair: Pair, expected: list[list[int]], sizes: Sizes
) -> None:
    executor = tree_executor(*pair, sizes, max_batch_size=4, overlap=True)
    assert [request.generated for request in run(executor, PROMPTS)] == expected


@pytest.mark.parametrize("mode", ["gumbel", "rejection"])
def test_seeded_tokens_are_those_of_the_embedded_host(new_layout: None, pair: Pair, mode: str) -> None:
    """Sampled and greedy requests in one batch, captured or not, whatever the slots."""
    rejects = {"use_rejection_sampling": mode == "rejection"}
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options) for options in SAMPLED]
    wanted = embedded_tokens(*pair, PROMPTS[:4], params, **rejects)
    greedy = embedded_tokens(*pair, PROMPTS[:4], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    assert wanted[1] == greedy[1] and all(wanted[row] != greedy[row] for row in (0, 2, 3))
    executor = tree_executor(*pair, max_batch_size=2, graph_batch_sizes=[2], overlap=True, **rejects)
    assert executor.model.spec_worker.verify == mode
    requests = run(executor, PROMPTS[:4], sampling=sampled_configs(), counts=[TOKENS] * 4)
    assert [request.generated for request in requests] == wanted
    assert any(count for request in requests for count in request.accepted_history)


def test_greedy_verification_ignores_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair, expected: list[list[int]]
) -> None:
    with tree_double(tmp_path / "double", "new", monkeypatch, TLLM_TREE_VERIFY="greedy"):
        executor = tree_executor(*pair)
        assert executor.model.spec_worker.verify == "greedy"
        (request,) = run(executor, PROMPTS[:1], sampling=[sampling_config(temperature=2.0, random_seed=3)])
        assert request.generated == expected[0]


@pytest.mark.parametrize("max_chunk", [7, 16])
def test_a_prompt_in_chunks_is_drafted_for_as_if_it_had_come_whole(
    layout: str, pair: Pair, max_chunk: int
) -> None:
    rounds = []
    for options in ({}, {"max_chunk": max_chunk}):
        executor = tree_executor(*pair, max_batch_size=3, **options)
        rounds.append(Rounds())
        executor.model.spec_worker.spec_round.observer = rounds[-1]
        run(executor, [PROMPTS[2]], counts=[10])
    whole, chunks = rounds
    assert len(whole.tokens) > 3
    assert chunks.tokens == whole.tokens and chunks.parents == whole.parents
    assert chunks.accepted == whole.accepted


def test_a_chunk_that_is_not_the_last_drafts_nothing(
    new_layout: None, pair: Pair, expected: list[list[int]]
) -> None:
    """Beside decode rows and other prompts, in every place of the batch."""
    executor = tree_executor(*pair, max_batch_size=3, max_chunk=16, overlap=True)
    worker, unfinished = executor.model.spec_worker, []
    inner = worker.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        trees = worker._parts.storage.trees
        for row, prompt in enumerate(trees.context_rows):
            if not prompt.is_last:
                unfinished.append(len(trees.context_rows) + kwargs["attn_metadata"].num_generations)
                assert not found["next_new_tokens"][row].any() and int(found["new_tokens_lens"][row]) == 1
                slot = worker._parts.storage.all_ids_buf[row]
                assert trees.next_parents.parents[slot].tolist() == list(range(-1, MAIN[2] - 1))
        return found

    worker.forward = forward
    assert [request.generated for request in run(executor, PROMPTS)] == expected
    assert {1, 3} & set(unfinished) and len(unfinished) > 4


@pytest.mark.parametrize("layers", [(1, 14, 26)])
def test_the_demo_model_generates_what_the_embedded_host_does(
    new_layout: None, layers: tuple[int, ...]
) -> None:
    target, head = resolve_target("demo"), resolve_head("demo")
    prompts = prompts_of(9, 21, vocab=2000)
    wanted = embedded_tokens(
        target, head, prompts, SamplingParams(max_tokens=16, ignore_eos=True), (4, 5, 20)
    )
    executor = tree_executor(target, head, (4, 5, 20), layers=layers, max_batch_size=2)
    requests = run(executor, prompts, counts=[16, 16])
    assert [request.generated for request in requests] == wanted
