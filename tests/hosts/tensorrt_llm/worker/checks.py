"""What holds of the worker whoever drafts: a head, or where it is None the target's own MTP layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.hosts.tensorrt_llm.tree_runs import (
    MAIN,
    cached_rows,
    plain_executor,
    sampling_config,
    tree_executor,
)
from tests.hosts.tensorrt_llm.worker.runs import PROMPTS, TOKENS, Rounds, Windows, run
from trtllm_tree import LLM, SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig

# Temperatures that keep the models' few tokens likely.
SAMPLED = (
    {"temperature": 0.8, "seed": 5},
    {},
    {"temperature": 1.3, "top_k": 3, "seed": 2**64 - 7},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02, "seed": 5},
)


def sampled_configs() -> list[Any]:
    """SAMPLED in TensorRT-LLM's words: a seed is `random_seed`."""
    return [
        sampling_config(
            **{("random_seed" if name == "seed" else name): value for name, value in options.items()}
        )
        for options in SAMPLED
    ]


def assert_drafted_for_alike_in_company(target: Path, head: Path | None) -> None:
    """A request's rows lie behind prompts' that arrive; every window that it gets is the one it gets alone."""
    executor = tree_executor(target, head, max_batch_size=3)
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


def assert_rows_are_plain_decodings(target: Path, head: Path | None, **options: Any) -> None:
    """What is committed is a chain's: row p holds the K and V of token p, in every layer of the target."""
    plain = plain_executor(target, max_batch_size=3, **options)
    requests = [plain.submit(prompt, max_tokens=2 * TOKENS) for prompt in PROMPTS[:3]]
    while not all(len(request.generated) > TOKENS + 6 for request in requests):
        plain.step()
    wanted = [cached_rows(plain, request, len(request.tokens) - 1) for request in requests]
    executor = tree_executor(target, head, max_batch_size=3, **options)
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


def assert_rounds_are_the_embedded_hosts(target: Path, head: Path | None, **options: Any) -> None:
    """Every drafted window, its scores and what was kept of it."""
    topk, steps, nodes = MAIN
    drafter = {"decoding_type": "MTP"} if head is None else {"speculative_model": str(head)}
    config = SpeculativeConfig(tree_topk=topk, num_steps=steps, num_nodes=nodes, **drafter)
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
