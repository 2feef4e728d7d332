"""The worker over the runtime double: tokens, drafts and cache rows are the embedded host's and plain decoding's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.tensorrt_llm.tree_runs import (
    MAIN,
    Sizes,
    agreeing_pair,
    cached_rows,
    embedded_tokens,
    plain_executor,
    prompts_of,
    sampling_config,
    tree_double,
    tree_executor,
)
from trtllm_tree import LLM, SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.demo import resolve_head, resolve_target
from trtllm_tree.errors import ConfigError, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.worker import verify_mode
from trtllm_tree.kernels.compact_window_rows import compact_window_rows

TOKENS = 24
# More than a batch holds, around page borders: prompts arrive while others decode, and end at different steps.
PROMPTS = prompts_of(5, 31, 33, 64, 1, 40)
LENGTHS = (TOKENS, 9, TOKENS, 3, 17, TOKENS)
# A temperature that keeps the agreeing pair's few tokens likely.
SAMPLED = (
    {"temperature": 0.8, "seed": 5},
    {},
    {"temperature": 1.3, "top_k": 3, "seed": 2**64 - 7},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02, "seed": 5},
)

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return agreeing_pair(tmp_path_factory.mktemp("agreeing"))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in LENGTHS]
    return embedded_tokens(*pair, PROMPTS, params)


@pytest.fixture(params=["new", "old"])
def layout(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tree_double(tmp_path / "double", request.param, monkeypatch):
        yield request.param


@pytest.fixture
def new_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tree_double(tmp_path / "double", "new", monkeypatch):
        yield


class Rounds:
    """Every drafted window and every accepted length."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.parents: list[Any] = []
        self.scores: list[torch.Tensor] = []
        self.accepted: list[Any] = []

    def on_drafted(self, slots: torch.Tensor, candidates: Any) -> None:
        self.tokens.append(candidates.tokens.tolist())
        self.parents.append(candidates.parents.tolist())
        self.scores.append(candidates.scores.cpu().clone())

    def on_verified(self, slots: torch.Tensor, accepted: Any) -> None:
        self.accepted.append(accepted.accept_len.tolist())


def run(executor: Any, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Generate LENGTHS tokens of each prompt; returns the requests."""
    sampling = options.get("sampling") or [None] * len(prompts)
    requests = [
        executor.submit(prompt, max_tokens=count, sampling=config)
        for prompt, count, config in zip(prompts, options.get("counts", LENGTHS), sampling, strict=False)
    ]
    while executor.step():
        pass
    return requests


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
    target, head = pair
    topk, steps, nodes = MAIN
    config = SpeculativeConfig(tree_topk=topk, num_steps=steps, num_nodes=nodes, speculative_model=str(head))
    embedded, ours = Rounds(), Rounds()
    with LLM(str(target), speculative_config=config, device="cpu", dtype="float32", max_seq_len=256) as llm:
        assert llm.spec_round is not None
        llm.spec_round.observer = embedded
        llm.generate([PROMPTS[2]], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    executor = tree_executor(target, head, **options)
    executor.model.spec_worker.spec_round.observer = ours
    run(executor, [PROMPTS[2]], counts=[TOKENS])
    assert len(ours.tokens) > TOKENS // 3
    assert ours.tokens == embedded.tokens
    assert ours.parents == embedded.parents
    assert ours.accepted == embedded.accepted
    for scores, others in zip(ours.scores, embedded.scores, strict=True):
        torch.testing.assert_close(scores, others, rtol=1e-3, atol=1e-3)
    trees = [row for window in ours.parents for row in window]
    assert any(row != list(range(-1, nodes - 1)) for row in trees), "a chain was drafted every time"


def test_a_request_is_drafted_for_alike_alone_and_beside_prompts_that_arrive(
    new_layout: None, pair: Pair
) -> None:
    """Its rows lie behind the prompts' then; every window that it gets is the same."""

    class Windows:
        """What was drafted for each slot."""

        def __init__(self) -> None:
            self.of: dict[int, list[Any]] = {}

        def on_drafted(self, slots: torch.Tensor, candidates: Any) -> None:
            rows = zip(slots.tolist(), candidates.tokens.tolist(), candidates.parents.tolist(), strict=True)
            for slot, tokens, parents in rows:
                self.of.setdefault(slot, []).append((tokens, parents))

        def on_verified(self, slots: torch.Tensor, accepted: Any) -> None: ...

    executor = tree_executor(*pair, max_batch_size=3)
    alone, windows = [], Windows()
    for prompt in PROMPTS[:3]:
        executor.model.spec_worker.spec_round.observer = one = Windows()
        run(executor, [prompt], counts=[TOKENS])
        alone += one.of.values()
    executor.model.spec_worker.spec_round.observer = windows
    requests = []
    for prompt in PROMPTS[:3]:
        requests.append(executor.submit(prompt, max_tokens=TOKENS))
        executor.step()
        executor.step()
    slots = [request.py_seq_slot for request in requests]
    while executor.step():
        pass
    assert [windows.of[slot] for slot in slots] == alone
    assert all(len(found) > 5 for found in alone)


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
    # A seed is `random_seed` in TensorRT-LLM.
    configs = [
        sampling_config(
            **{("random_seed" if name == "seed" else name): value for name, value in options.items()}
        )
        for options in SAMPLED
    ]
    requests = run(executor, PROMPTS[:4], sampling=configs, counts=[TOKENS] * 4)
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


@pytest.mark.parametrize("options", [{}, {"kv_manager": "v2", "tokens_per_block": 32}], ids=["v1", "v2"])
def test_rows_behind_every_step_are_those_of_plain_decoding(
    layout: str, pair: Pair, options: dict[str, Any]
) -> None:
    """What is committed is a chain's: row p holds the K and V of token p, in every layer."""
    plain = plain_executor(pair[0], max_batch_size=3, **options)
    requests = [plain.submit(prompt, max_tokens=2 * TOKENS) for prompt in PROMPTS[:3]]
    while not all(len(request.generated) > TOKENS + 6 for request in requests):
        plain.step()
    wanted = [cached_rows(plain, request, len(request.tokens) - 1) for request in requests]
    executor = tree_executor(*pair, max_batch_size=3, **options)
    found = [executor.submit(prompt, max_tokens=TOKENS) for prompt in PROMPTS[:3]]
    steps = 0
    while executor.step():
        for request, rows in zip(found, wanted, strict=True):
            if request.py_request_id not in executor.kv_cache_manager.ledger.blocks:
                continue
            count = len(request.tokens) - 1
            # One row or N of them at once: their sums are added in another order.
            error = (cached_rows(executor, request, count) - rows[:, :, :, :count]).abs().amax()
            assert error < 1e-5 * rows.abs().amax()
            steps += 1
    assert steps > TOKENS // 2


@contextmanager
def watched_compaction(executor: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Checks every move of rows, byte for byte over whole pools; gives the paths."""
    import trtllm_tree.attention.compact as module

    paths: list[torch.Tensor] = []
    pool = executor.model.spec_worker._parts.pool
    pages = executor.kv_cache_manager.pools

    def compact(table: Any, slots: torch.Tensor, path: torch.Tensor, *, max_depth: int | None = None) -> None:
        paths.append(path.clone())
        wanted = [pool_.clone() for pool_ in pages]
        layers = [layer for layer in executor.kv_cache_manager.layer_offsets if layer < 4]
        before = [[view.clone() for view in pool.views(layer) if view is not None] for layer in layers]
        compact_window_rows(table, slots, path, max_depth=max_depth)
        moved = torch.zeros((), dtype=torch.bool)
        for layer, old in zip(layers, before, strict=True):
            (group,) = {pool.group_of(layer)}
            for view, was in zip(pool.views(layer), old, strict=True):
                assert view is not None
                expected = was.clone()
                for b, kept in enumerate(path.tolist()):
                    for depth, node in enumerate(node for node in kept if node >= 0):
                        source, into = int(slots[group, b, node]), int(slots[group, b, depth])
                        rows = was[source // pool.page_size, :, source % pool.page_size]
                        expected[into // pool.page_size, :, into % pool.page_size] = rows
                        moved |= source != into
                assert view.view(torch.int32).equal(expected.view(torch.int32))
        if not moved:
            # Then not a byte of any pool, the head's included, has changed.
            assert all(
                p.view(torch.int32).equal(w.view(torch.int32)) for p, w in zip(pages, wanted, strict=True)
            )

    monkeypatch.setattr(module, "compact_window_rows", compact)
    yield paths
    monkeypatch.setattr(module, "compact_window_rows", compact_window_rows)


def test_compaction_moves_the_kept_rows_and_touches_no_other(
    new_layout: None, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = tree_executor(*pair, max_batch_size=3)
    with watched_compaction(executor, monkeypatch) as paths:
        run(executor, PROMPTS[:3], counts=[12, 7, 12])
    branches = [kept for path in paths for kept in path.tolist() if kept[1] > 1]
    assert branches, "no step left the best path"


def test_results_are_chain_shaped_and_agree_with_the_slots_and_the_scheduler(
    new_layout: None, pair: Pair
) -> None:
    _, steps, nodes = MAIN
    executor = tree_executor(*pair, max_batch_size=3)
    worker, results = executor.model.spec_worker, []
    inner = worker.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        metadata = kwargs["attn_metadata"]
        storage = kwargs["resource_manager"].resource_managers
        slots = next(iter(storage.values())).spec_tree_manager.slot_storage
        size = metadata.num_seqs
        ids = slots.all_ids_buf[:size]
        assert "accepted_draft_tokens_indices" not in found
        assert found["new_tokens"].shape == (size, steps + 1)
        assert (
            found["next_draft_tokens"].shape == (size, nodes - 1)
            and found["next_draft_tokens"].is_contiguous()
        )
        assert found["next_new_tokens"].shape == (size, nodes)
        assert {value.dtype for name, value in found.items() if name != "logits"} == {torch.int32}
        last = found["new_tokens_lens"].long() - 1
        assert torch.equal(found["next_new_tokens"][:, 0], found["new_tokens"].gather(1, last[:, None])[:, 0])
        assert torch.equal(found["next_new_tokens"][:, 1:], found["next_draft_tokens"])
        assert torch.equal(found["next_new_tokens"], worker.spec_round.future_input_map[ids])
        parents = slots.trees.next_parents.parents[ids]
        assert bool((parents[:, 1:] < torch.arange(1, nodes)).all()) and bool((parents[:, 0] == -1).all())
        assert int(found["new_tokens_lens"].max()) <= steps + 1
        results.append(metadata.num_contexts)
        return found

    worker.forward = forward
    requests = [
        executor.submit(prompt, max_tokens=count) for prompt, count in zip(PROMPTS, LENGTHS, strict=True)
    ]
    while executor.step():
        for request in executor._active:
            if request.accepted_history:
                assert request.py_rewind_len == nodes - 1 - request.accepted_history[-1]
                assert request.py_num_accepted_draft_tokens_indices == []
                assert executor.kv_cache_manager.ledger.rows[request.py_request_id] == (
                    len(request.tokens) - 1 + executor.kv_cache_manager.num_extra_kv_tokens
                )
    assert {0, 1, 3} <= set(results), "prompts alone, decoding alone and both together"
    assert sum(len(request.generated) for request in requests) == sum(LENGTHS)


def test_slots_of_other_requests_keep_their_windows(new_layout: None, pair: Pair) -> None:
    executor = tree_executor(*pair, max_batch_size=3)
    parts = executor.model.spec_worker._parts
    parents = parts.storage.trees.next_parents.parents
    executor.submit(PROMPTS[0], max_tokens=TOKENS)
    executor.step()
    (slot,) = [request.py_seq_slot for request in executor._active]
    others = [index for index in range(parents.shape[0]) if index != slot]
    parents[others] = 0
    parts.round.future_input_map[others] = 77
    kept = parents[slot].clone()
    for _ in range(4):
        executor.step()
    assert not parents[others].any() and bool((parts.round.future_input_map[others] == 77).all())
    assert not torch.equal(parents[slot], kept)


def test_every_decode_step_finds_all_of_its_buffers_where_the_first_did(new_layout: None, pair: Pair) -> None:
    """What a captured call reads and returns lies where it lay when it was captured, before there was any tree."""
    executor = tree_executor(*pair, max_batch_size=2, graph_batch_sizes=[2])
    worker, seen = executor.model.spec_worker, []
    inner = worker.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        if not kwargs["attn_metadata"].num_contexts:
            seen.append({name: value.data_ptr() for name, value in found.items() if name != "logits"})
            seen[-1] |= _addresses(worker)
        return found

    worker.forward = forward
    run(executor, PROMPTS[:2], counts=[TOKENS, TOKENS])
    assert len(seen) > 4
    assert all(step == seen[0] for step in seen[1:])


def _addresses(worker: Any) -> dict[str, int]:
    """Of every tensor that the worker, its round and its slots hold."""
    found: dict[str, int] = {}
    todo, done = [("worker", worker._parts)], set()
    while todo:
        name, owner = todo.pop()
        if id(owner) in done or isinstance(owner, torch.nn.Module):
            continue
        done.add(id(owner))
        if isinstance(owner, torch.Tensor):
            found[name] = owner.data_ptr()
        elif type(owner).__module__.startswith("trtllm_tree"):
            held = getattr(owner, "__dict__", {}).items()
            todo += [(f"{name}.{key}", value) for key, value in held if key not in ("managers", "_bound")]
    return found


def test_parts_are_built_again_over_other_managers(
    new_layout: None, pair: Pair, expected: list[list[int]]
) -> None:
    """TensorRT-LLM measures memory over a small cache first, and then makes another."""
    executor = tree_executor(*pair, max_batch_size=3)
    first = executor.model.spec_worker._parts
    run(executor, PROMPTS[:2])
    limits = {"tokens_per_block": 16, "max_seq_len": 256, "max_batch_size": 3}
    executor._make_managers("v2", None, limits)
    executor.engine.resource_manager = executor.resource_manager
    executor.engine.kv_cache_manager = executor.kv_cache_manager
    executor.engine.spec_tree_manager = executor.tree_resources.spec_tree_manager
    executor.engine.eager.attn_metadata.kv_cache_manager = executor.kv_cache_manager
    executor.warmup()
    again = executor.model.spec_worker._parts
    assert again is not first and again.pool is not first.pool and again.storage is not first.storage
    assert [request.generated for request in run(executor, PROMPTS)] == expected


def test_a_window_without_a_tree_keeps_at_most_one_token_a_depth(new_layout: None, pair: Pair) -> None:
    """A slot that was reset holds a chain of N nodes, deeper than any drafted tree; the sampler takes S + 1 tokens."""
    executor = tree_executor(*pair)
    request = executor.submit(PROMPTS[0], max_tokens=40)
    executor.step()
    continuation = executor.generate([PROMPTS[0]], max_tokens=40)[0]
    assert request.generated == continuation
    request = executor.submit(PROMPTS[0], max_tokens=40)
    executor.step()
    slot = request.py_seq_slot
    executor.engine.spec_tree_manager.slot_storage.trees.next_parents.reset(slot)
    chain = torch.tensor(continuation[: MAIN[2]], dtype=torch.int32)
    executor.sampler.next_new_tokens[:, slot, 0] = chain
    executor.step()
    assert request.generated == continuation[: MAIN[1] + 2]


def test_logits_that_are_no_numbers_give_tokens_that_can_be_looked_up(new_layout: None, pair: Pair) -> None:
    executor = tree_executor(*pair)
    worker, results = executor.model.spec_worker, []
    inner = worker.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs | {"logits": torch.full_like(kwargs["logits"], torch.nan)})
        results.append((kwargs["attn_metadata"].num_contexts, found))
        assert int(found["new_tokens"].min()) >= 0 and int(found["next_new_tokens"].min()) >= 0
        assert found["new_tokens_lens"].tolist() == [1]
        return found

    worker.forward = forward
    executor.submit(PROMPTS[0], max_tokens=3)
    executor.step()
    executor.step()
    assert [contexts for contexts, _ in results] == [1, 0]


def test_the_verify_mode_is_one_of_three(pair: Pair) -> None:
    config = type("Config", (), {"use_rejection_sampling": False})()
    assert verify_mode(config, {}) == "gumbel"
    assert verify_mode(config, {"TLLM_TREE_VERIFY": "rejection"}) == "rejection"
    config.use_rejection_sampling = True
    assert verify_mode(config, {}) == "rejection"
    assert verify_mode(config, {"TLLM_TREE_VERIFY": "greedy"}) == "greedy"
    with pytest.raises(ConfigError, match=r"TLLM_TREE_VERIFY.*typical.*greedy, gumbel, rejection"):
        verify_mode(config, {"TLLM_TREE_VERIFY": "typical"})


def test_what_cannot_be_honoured_is_refused_by_name(new_layout: None, pair: Pair, monkeypatch: Any) -> None:
    worker = tree_executor(*pair).model.spec_worker
    with pytest.raises(UnsupportedError, match="guided_decoding_backend"):
        worker.set_guided_decoder(object())
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "3")
    worker.force_num_accepted_tokens = 3.0
    with pytest.raises(ConfigError, match="TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS = '3'"):
        worker.prepare_rounds(None, None)


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
