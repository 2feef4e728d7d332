"""Invariant I6 over the runtime double: recurrent states of a hybrid target follow the tree, and its accepted path."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.hosts.tensorrt_llm.hybrid_runs import hybrid_pair
from tests.hosts.tensorrt_llm.tree_runs import (
    plain_executor,
    prompts_of,
    sampling_config,
    tree_executor,
)
from trtllm_tree.errors import UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.recurrent import RecurrentStates, TreeLinks, layers_with_rows
from trtllm_tree.sampling.base import Accepted
from trtllm_tree.tree.topology import chain_parents

Pair = tuple[Path, Path]
# More than a batch holds: prompts arrive while others decode.
PROMPTS = prompts_of(5, 31, 33, 64, 1)
TOKENS = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return hybrid_pair(tmp_path_factory.mktemp("hybrid"))


def double(module: str) -> Any:
    return importlib.import_module(f"tensorrt_llm._double.{module}")


def generate(executor: Any, prompts: list[list[int]], sampling: Any = None) -> list[Any]:
    requests = [executor.submit(prompt, max_tokens=TOKENS, sampling=sampling) for prompt in prompts]
    while executor.step():
        pass
    return requests


def state_of(executor: Any, request: Any) -> torch.Tensor:
    """Its states, [layers, channels]."""
    manager = executor.kv_cache_manager
    return manager.states[:, manager._state_of[request.py_request_id]].clone()


def prefilled_state(target: Path, tokens: list[int]) -> torch.Tensor:
    """What the states are behind a prompt of these tokens."""
    executor = plain_executor(target)
    request = executor.submit(tokens, max_tokens=2)
    executor.step()
    return state_of(executor, request)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_manager": "v2", "separate": True, "tokens_per_block": 32},
        {"overlap": True, "graph_batch_sizes": [1, 3], "max_chunk": 7},
    ],
    ids=["plain", "v2", "overlap"],
)
def test_tree_chain_and_plain_decoding_generate_the_same_tokens(
    layout: str, pair: Pair, options: dict[str, Any]
) -> None:
    target, head = pair
    plain = plain_executor(target, max_batch_size=3).generate(PROMPTS, max_tokens=TOKENS)
    executor = tree_executor(target, head, max_batch_size=3, **options)
    requests = generate(executor, PROMPTS)
    assert [request.generated for request in requests] == plain
    kept = [count for request in requests for count in request.accepted_history]
    assert max(kept) >= 3 and 0 in kept, "the drafts of this pair are neither always right nor always wrong"
    chain = double("llm_args").Eagle3DecodingConfig(
        max_draft_len=3, speculative_model=str(head), eagle3_layers_to_capture={0, 1, 2}
    )
    executor = plain_executor(target, max_batch_size=3, speculative_config=chain)
    assert type(executor.model.spec_worker).__name__ == "Eagle3OneModelWorker"
    assert [request.generated for request in generate(executor, PROMPTS)] == plain


@pytest.mark.parametrize("options", [{}, {"kv_manager": "v2", "separate": True}], ids=["v1", "v2"])
def test_states_behind_every_step_are_those_of_plain_decoding(
    layout: str, pair: Pair, options: dict[str, Any]
) -> None:
    plain, wanted = plain_executor(pair[0], max_batch_size=3), {}
    requests = [plain.submit(prompt, max_tokens=TOKENS) for prompt in PROMPTS[:3]]
    while plain.step():
        for index, request in enumerate(requests):
            if request.py_request_id in plain.kv_cache_manager._state_of:
                wanted[index, len(request.tokens)] = state_of(plain, request)
    executor, compared, jumps = tree_executor(*pair, max_batch_size=3, **options), 0, 0
    requests = [executor.submit(prompt, max_tokens=TOKENS) for prompt in PROMPTS[:3]]
    while executor.step():
        for index, request in enumerate(requests):
            state = wanted.get((index, len(request.tokens)))
            if state is not None and request.py_request_id in executor.kv_cache_manager._state_of:
                torch.testing.assert_close(state_of(executor, request), state, rtol=1e-4, atol=1e-5)
                compared += 1
                jumps += bool(request.accepted_history and request.accepted_history[-1])
    assert compared > TOKENS and jumps > 5


def test_states_of_drawn_tokens_are_those_of_a_prompt_of_them(new_layout: None, pair: Pair) -> None:
    executor = tree_executor(*pair)
    sampling = sampling_config(temperature=0.8, random_seed=5)
    request = executor.submit(PROMPTS[1], max_tokens=TOKENS, sampling=sampling)
    found = []
    while executor.step():
        if request.py_request_id in executor.kv_cache_manager._state_of:
            found.append((list(request.tokens[:-1]), state_of(executor, request)))
    greedy = plain_executor(pair[0]).generate(PROMPTS[1:2], max_tokens=TOKENS)
    assert [request.generated] != greedy and any(request.accepted_history)
    for tokens, state in found:
        torch.testing.assert_close(state, prefilled_state(pair[0], tokens), rtol=1e-4, atol=1e-5)


def test_only_layers_with_keys_and_values_are_compacted(new_layout: None, pair: Pair) -> None:
    executor = tree_executor(*pair)
    assert list(executor.model.spec_worker._parts.pool.layers) == [2, 5]
    assert layers_with_rows(executor.kv_cache_manager) == [2, 5, 6], "and the head's own"


def linked(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, slowly."""
    nodes = range(len(parents))
    children = {node: [child for child in nodes if parents[child] == node] for node in nodes}
    siblings = {left: right for row in children.values() for left, right in itertools.pairwise(row)}
    return [children[node][0] if children[node] else -1 for node in nodes], [
        siblings.get(node, -1) for node in nodes
    ]


@pytest.mark.parametrize("nodes", [2, 7, 64])
def test_links_are_first_children_and_next_siblings_at_fixed_addresses(
    nodes: int, device: torch.device | str
) -> None:
    generator = torch.Generator().manual_seed(nodes)
    links = TreeLinks(4, nodes, torch.device(device))
    addresses = set()
    for size in (4, 1, 3):
        rows = [chain_parents(nodes).tolist(), [-1] + [0] * (nodes - 1)]
        for _ in range(size):
            drawn = [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes)]
            rows.append([-1, *drawn])
        rows = rows[:size]
        parents = torch.tensor(rows, dtype=torch.int32, device=device)
        found = links.of(parents)
        assert [one.dtype for one in found] == [torch.int32] * 2 and all(one.is_contiguous() for one in found)
        assert list(zip(*(one.tolist() for one in found), strict=True)) == [linked(row) for row in rows]
        addresses.add(tuple(one.data_ptr() for one in found))
    assert len(addresses) == 1


def test_the_accepted_leaf_is_the_last_kept_node_of_each_generation_request() -> None:
    called: dict[str, Any] = {}
    manager = SimpleNamespace(update_mamba_states=lambda **given: called.update(given))
    indices = torch.tensor([4, 0, 2, 1], dtype=torch.int32)
    metadata = SimpleNamespace(num_contexts=1, mamba_metadata=SimpleNamespace(state_indices=indices))
    path = torch.tensor([[0, -1, -1, -1], [0, 3, 4, -1], [0, 1, 2, 3]], dtype=torch.int32)
    accepted = Accepted(predict=path, accept_len=torch.tensor([1, 3, 4], dtype=torch.int32), path=path)
    # Of the last one, a chain of dummies, less is kept than was accepted.
    kept = torch.tensor([1, 1, 3, 3], dtype=torch.int32)
    RecurrentStates(manager, 3, 4, torch.device("cpu")).close(metadata, accepted, kept)
    assert called["accepted_leaf_positions"].tolist() == [0, 4, 2]
    assert called["attn_metadata"] is metadata and called["state_indices"] is indices
    assert called["num_accepted_tokens"] is kept


def without_leaf(
    self: Any, attn_metadata: Any, num_accepted_tokens: Any, state_indices: Any = None
) -> None: ...


def test_a_manager_that_follows_no_tree_is_refused_before_anything_is_built(
    layout: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(double("mamba").MambaCacheManager, "update_mamba_states", without_leaf)
    built: list[Any] = []
    monkeypatch.setattr(
        double("nemotron").NemotronHForCausalLM, "__init__", lambda self, model_config: built.append(self)
    )
    with pytest.raises(UnsupportedError) as caught:
        tree_executor(*pair)
    (problem,) = caught.value.problems
    assert problem.option.endswith("mamba_cache_manager.MambaCacheManager.update_mamba_states")
    assert "accepted_leaf_positions" in problem.rule and "recurrent layers" in problem.rule
    assert not built


def test_a_hybrid_manager_of_its_own_ways_is_refused_by_name_at_the_first_warm_up(
    new_layout: None, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(double("mamba").MambaHybridCacheManager, "update_mamba_states", without_leaf)
    with pytest.raises(
        UnsupportedError, match=r"MambaHybridCacheManager.update_mamba_states.*accepted_leaf_pos"
    ):
        tree_executor(*pair)


def test_replayed_states_are_refused_by_name_at_the_first_warm_up(
    new_layout: None, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match=r"replayed.*TRTLLM_USE_MAMBA_REPLAY") as caught:
        tree_executor(*pair, replay=True)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("silent", ["worker", "storage"])
def test_the_worker_and_the_slot_storage_give_the_same_links(
    layout: str, pair: Pair, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """TensorRT-LLM asks the storage before a step, the worker publishes inside of it: either one suffices."""
    plain = plain_executor(pair[0], max_batch_size=3).generate(PROMPTS, max_tokens=TOKENS)
    executor = tree_executor(*pair, max_batch_size=3)
    if silent == "worker":
        monkeypatch.setattr(RecurrentStates, "open", lambda *args: None)
    else:
        storage = type(executor.tree_resources.spec_tree_manager.slot_storage)
        # Back to TensorRT-LLM's own, whose trees are chains.
        monkeypatch.setattr(
            storage, "next_links_from_slots", double("spec_tree").DynamicTreeSlotStorage.next_links_from_slots
        )
    requests = generate(executor, PROMPTS)
    assert [request.generated for request in requests] == plain


@pytest.mark.parametrize("damage", ["links", "leaf"])
def test_a_state_that_follows_another_node_is_seen_in_the_tokens(
    new_layout: None, pair: Pair, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """That the tests above can fail: rows in the order of nodes, or the state of the root, give other tokens."""
    plain = plain_executor(pair[0], max_batch_size=3).generate(PROMPTS, max_tokens=TOKENS)
    links, close = TreeLinks.of, RecurrentStates.close

    def chained(self: Any, parents: torch.Tensor) -> Any:
        return links(self, chain_parents(parents.shape[1]).expand_as(parents))

    def rooted(self: Any, attn_metadata: Any, accepted: Any, kept_lens: torch.Tensor) -> None:
        close(self, attn_metadata, accepted, torch.ones_like(kept_lens))

    if damage == "links":
        monkeypatch.setattr(TreeLinks, "of", chained)
    else:
        monkeypatch.setattr(RecurrentStates, "close", rooted)
    requests = generate(tree_executor(*pair, max_batch_size=3), PROMPTS)
    assert [request.generated for request in requests] != plain
