"""What one worker call reads, returns and refuses, and what it leaves in the slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.tensorrt_llm.mtp_runs import glm_dir
from tests.hosts.tensorrt_llm.tree_runs import MAIN, tree_executor
from tests.hosts.tensorrt_llm.worker.runs import LENGTHS, PROMPTS, TOKENS, Pair, run
from trtllm_tree.errors import ConfigError, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.worker_parts import verify_mode


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


@pytest.mark.parametrize("drafter", ["head", "mtp"])
def test_every_decode_step_finds_all_of_its_buffers_where_the_first_did(
    new_layout: None, pair: Pair, tmp_path: Path, drafter: str
) -> None:
    """What a captured call reads and returns lies where it lay when it was captured, before there was any tree."""
    target, head = pair if drafter == "head" else (glm_dir(tmp_path), None)
    executor = tree_executor(target, head, max_batch_size=2, graph_batch_sizes=[2])
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
        worker.prepare_rounds(worker._make_head, None)
