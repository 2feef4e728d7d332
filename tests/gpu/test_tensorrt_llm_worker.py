"""TensorRT-LLM's decode step with our worker in it, captured at warm-up before there is any tree, and replayed.

The runtime double captures the whole model call as TensorRT-LLM does: target layers, logits, verification,
compaction, draft step 0, lanes, selection. A call that waits for the device cannot be captured at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.sync_trap import waiting_fails
from tests.hosts.tensorrt_llm.hybrid_runs import hybrid_mtp_dir, hybrid_pair
from tests.hosts.tensorrt_llm.mtp_runs import glm_dir
from tests.hosts.tensorrt_llm.tree_runs import (
    agreeing_pair,
    cached_rows,
    embedded_tokens,
    plain_executor,
    prompts_of,
    sampling_config,
    tree_double,
    tree_executor,
)
from trtllm_tree import SamplingParams
from trtllm_tree.demo import resolve_head, resolve_target

pytestmark = pytest.mark.gpu

# Batches of 3, 2 and 1 requests run in graphs of 4, 2 and 1: pad rows, arrivals between decode steps, unequal ends.
GRAPHS = {"graph_batch_sizes": [1, 2, 4], "max_batch_size": 4}
PROMPTS = prompts_of(5, 31, 33, 64, 1, 40)
BUDGETS = [32, 9, 40, 3, 17, 32]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 5},
    {},
    {"temperature": 1.3, "top_k": 3, "seed": 2**63 + 11},
    {},
    {"temperature": 0.7, "top_p": 0.8, "seed": 5},
    {},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return agreeing_pair(tmp_path_factory.mktemp("agreeing"), hidden_size=256)


def _tokens(
    executor: Any, options: list[dict[str, Any]] | None = None, *, accepted: int = 3
) -> list[list[int]]:
    configs = [
        sampling_config(
            **{("random_seed" if name == "seed" else name): value for name, value in option.items()}
        )
        for option in options or [{}] * len(PROMPTS)
    ]
    requests = [
        executor.submit(prompt, max_tokens=budget, sampling=config)
        for prompt, budget, config in zip(PROMPTS, BUDGETS, configs, strict=True)
    ]
    while executor.step():
        pass
    assert max(count for request in requests for count in request.accepted_history) >= accepted
    return [request.generated for request in requests]


class Calls:
    """Counts the worker calls that Python makes: a replay makes none."""

    def __init__(self, executor: Any) -> None:
        self.prompts = self.decodes = 0
        worker = executor.model.spec_worker
        inner = worker.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if kwargs["attn_metadata"].num_contexts:
                self.prompts += 1
            else:
                self.decodes += 1
            return inner(*args, **kwargs)

        worker.forward = forward


@pytest.mark.parametrize("layout", ["new", "old"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True, "separate": True},
        {"overlap": True, "kv_manager": "v2", "tokens_per_block": 32},
        {"rope_fusion": False, "tokens_per_block": 64},
    ],
    ids=["plain", "overlap", "v2", "unfused"],
)
def test_a_step_captured_before_any_tree_serves_every_tree(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    layout: str,
    options: dict[str, Any],
) -> None:
    params = [SamplingParams(max_tokens=budget, ignore_eos=True) for budget in BUDGETS]
    wanted = embedded_tokens(*pair, PROMPTS, params, device="cuda")
    with tree_double(tmp_path / "double", layout, monkeypatch, device="cuda"):
        eager = tree_executor(*pair, max_batch_size=4, **options)
        assert _tokens(eager) == wanted
        captured = tree_executor(*pair, **GRAPHS, **options)
        assert all(state.graph is not None for state in captured.engine.graphs.values())
        calls = Calls(captured)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        assert _tokens(captured) == wanted
        assert calls.prompts > 1 and calls.decodes == 0, "decode steps alone are replayed"
        # The slots, their parents and the graphs' buffers now hold what the first run left there.
        assert _tokens(captured) == wanted
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 2**20, "a replayed step leaves something behind"


def test_rows_behind_every_replayed_step_are_those_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]
) -> None:
    """What is committed is a chain's: row p holds the K and V of token p, in every layer."""
    prompts, budget = PROMPTS[:3], 32
    with tree_double(tmp_path / "double", "new", monkeypatch, device="cuda"):
        plain = plain_executor(pair[0], max_batch_size=4)
        requests = [plain.submit(prompt, max_tokens=2 * budget) for prompt in prompts]
        while not all(len(request.generated) > budget + 6 for request in requests):
            plain.step()
        wanted = [cached_rows(plain, request, len(request.tokens) - 1) for request in requests]
        captured = tree_executor(*pair, **GRAPHS)
        calls = Calls(captured)
        found = [captured.submit(prompt, max_tokens=budget) for prompt in prompts]
        largest, steps = 0.0, 0
        while captured.step():
            for request, rows in zip(found, wanted, strict=True):
                if request.py_request_id not in captured.kv_cache_manager.ledger.blocks:
                    continue
                count = len(request.tokens) - 1
                error = (cached_rows(captured, request, count) - rows[:, :, :, :count]).abs().amax()
                largest, steps = max(largest, float(error / rows.abs().amax())), steps + 1
        print(f"rows of {steps} steps are off by {largest:.2g} of the largest value at most")
        assert calls.decodes == 0 and steps > budget // 2
        # One row or N of them at once: their sums are added in another order.
        assert largest < 1e-4


def test_the_demo_model_generates_what_the_embedded_host_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head, sizes = resolve_target("demo"), resolve_head("demo"), (4, 5, 20)
    prompts, budget = prompts_of(9, 21, vocab=2000), 32
    params = SamplingParams(max_tokens=budget, ignore_eos=True)
    wanted = embedded_tokens(target, head, prompts, params, sizes, device="cuda")
    with tree_double(tmp_path / "double", "new", monkeypatch, device="cuda"):
        captured = tree_executor(
            target, head, sizes, layers=(1, 14, 26), graph_batch_sizes=[1, 2], max_batch_size=2
        )
        calls = Calls(captured)
        requests = [captured.submit(prompt, max_tokens=budget) for prompt in prompts]
        while captured.step():
            pass
        assert calls.decodes == 0
        assert [request.generated for request in requests] == wanted
        assert max(count for request in requests for count in request.accepted_history) >= 2


def test_recurrent_states_follow_the_trees_of_replayed_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = hybrid_pair(tmp_path, hidden_size=256)
    with tree_double(tmp_path / "double", "new", monkeypatch, device="cuda"):
        wanted = plain_executor(target, max_batch_size=4).generate(PROMPTS, max_tokens=max(BUDGETS))
        captured = tree_executor(target, head, **GRAPHS, overlap=True)
        calls = Calls(captured)
        assert _tokens(captured, accepted=2) == [
            tokens[:budget] for tokens, budget in zip(wanted, BUDGETS, strict=True)
        ]
        assert calls.decodes == 0


@pytest.mark.parametrize("layout", ["new", "old"])
@pytest.mark.parametrize("make", [glm_dir, hybrid_mtp_dir])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True, "separate": True, "kv_manager": "v2", "tokens_per_block": 32}],
    ids=["plain", "v2"],
)
def test_replayed_steps_draft_with_the_targets_mtp_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, make: Any, options: dict[str, Any]
) -> None:
    target = make(tmp_path, hidden_size=256)
    with tree_double(tmp_path / "double", layout, monkeypatch, device="cuda"):
        wanted = plain_executor(target, max_batch_size=4).generate(PROMPTS, max_tokens=max(BUDGETS))
        wanted = [tokens[:budget] for tokens, budget in zip(wanted, BUDGETS, strict=True)]
        captured = tree_executor(target, None, **GRAPHS, **options)
        assert all(state.graph is not None for state in captured.engine.graphs.values())
        calls = Calls(captured)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        assert _tokens(captured, accepted=2) == wanted
        assert calls.prompts > 1 and calls.decodes == 0, "decode steps alone are replayed"
        assert _tokens(captured, accepted=2) == wanted
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 2**20, "a replayed step leaves something behind"


@pytest.mark.parametrize("mode", ["gumbel", "rejection"])
def test_a_step_captured_over_greedy_dummies_draws_with_each_requests_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], mode: str
) -> None:
    rejects = {"use_rejection_sampling": mode == "rejection"}
    params = [
        SamplingParams(max_tokens=budget, ignore_eos=True, **option)
        for budget, option in zip(BUDGETS, SAMPLED, strict=True)
    ]
    wanted = embedded_tokens(*pair, PROMPTS, params, device="cuda", **rejects)
    with tree_double(tmp_path / "double", "new", monkeypatch, device="cuda"):
        captured = tree_executor(*pair, **GRAPHS, overlap=True, **rejects)
        calls = Calls(captured)
        assert _tokens(captured, SAMPLED) == wanted
        assert calls.decodes == 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_in_bfloat16_replayed_steps_give_the_tokens_of_eager_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], kv_cache_dtype: str
) -> None:
    options = {"dtype": torch.bfloat16, "kv_cache_dtype": kv_cache_dtype, "overlap": True}
    with tree_double(tmp_path / "double", "new", monkeypatch, device="cuda"):
        # The same batches padded to the same sizes, so that every product has the same shape.
        runs = []
        for is_captured in (False, True):
            executor = tree_executor(*pair, **GRAPHS, **options)
            if not is_captured:
                for state in executor.engine.graphs.values():
                    state.graph = None
            runs.append(_tokens(executor))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("drafter", ["head", "mtp"])
def test_an_eager_decode_step_never_waits_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], drafter: str
) -> None:
    target, head = pair if drafter == "head" else (glm_dir(tmp_path, hidden_size=256), None)
    with tree_double(tmp_path / "double", "new", monkeypatch, device="cuda"):
        executor = tree_executor(target, head, max_batch_size=4)
        inner, steps = executor.model.forward, []

        def forward(**inputs: Any) -> Any:
            if inputs["attn_metadata"].num_contexts or len(executor._active) < 2:
                return inner(**inputs)
            steps.append(1)
            with waiting_fails():
                return inner(**inputs)

        executor.model.forward = forward
        _tokens(executor, accepted=2 if head is None else 3)
        assert len(steps) > 4
