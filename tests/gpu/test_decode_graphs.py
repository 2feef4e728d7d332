"""Decode steps as CUDA graphs give the eager engine's tokens, for plain decoding, chains and trees (bugs C1, C2)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.builders import tiny_deepseek_dir, tiny_eagle3_dir
from tests.oracles.known_continuation import RoundLog
from trtllm_tree import LLM, SamplingParams, SpeculativeConfig
from trtllm_tree.engine.decode_step import DecodeGraphs

pytestmark = pytest.mark.gpu

MODES = {
    "plain": None,
    "chain": {"tree_topk": 1, "num_steps": 4},
    "tree": {"tree_topk": 4, "num_steps": 4, "num_nodes": 24},
}
# Unequal prompts and budgets: the batch shrinks from 5 to 1, and every size but a power of two has pad rows.
PROMPTS = [[3, 5, 7], [11] * 40, [2, 4, 6, 8, 10, 12], list(range(20, 50)), [9]]
BUDGETS = [40, 12, 33, 5, 21]


def _llm(target: Path, head: Path, mode: str, *, cuda_graphs: bool, dtype: str = "float32") -> LLM:
    options = MODES[mode]
    config = None if options is None else SpeculativeConfig(speculative_model=str(head), **options)
    return LLM(
        str(target),
        speculative_config=config,
        dtype=dtype,
        device="cuda",
        max_batch_size=6,
        max_seq_len=128,
        tokens_per_block=16,
        cuda_graphs=cuda_graphs,
    )


def _tokens(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(max_tokens=budget, ignore_eos=True) for budget in BUDGETS]
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("mode", MODES)
def test_replayed_steps_give_the_tokens_of_eager_ones(mode: str, tiny_target: Path, tiny_head: Path) -> None:
    with _llm(tiny_target, tiny_head, mode, cuda_graphs=False) as llm:
        want = _tokens(llm)
    with _llm(tiny_target, tiny_head, mode, cuda_graphs=True) as llm:
        groups = llm.engine.cache.groups
        free = [group.allocator.num_free for group in groups]
        assert _tokens(llm) == want
        step = llm.engine._decode_step
        assert isinstance(step, DecodeGraphs)
        assert {key[0] for key in step._captured} == {1, 2, 4, 6} and len(step._captured) == 4
        # The graphs' buffers now hold the last run's rows; a second run must not see them.
        assert _tokens(llm) == want
        assert [group.allocator.num_free for group in groups] == free
        pad_rows = torch.stack([group.page_table[-1] for group in groups])
        assert not pad_rows.any(), "the pad slot owns a page"


@pytest.mark.parametrize("mode", MODES)
def test_replayed_draws_are_those_of_eager_steps_beside_greedy_requests(
    mode: str, tiny_target: Path, tiny_head: Path
) -> None:
    params = [
        SamplingParams(max_tokens=budget, ignore_eos=True, temperature=0.8 * (i % 2), top_p=0.9, seed=i)
        for i, budget in enumerate(BUDGETS)
    ]
    results = []
    for cuda_graphs in (False, True):
        with _llm(tiny_target, tiny_head, mode, cuda_graphs=cuda_graphs) as llm:
            results.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)])
    assert results[0] == results[1]


def test_a_watched_round_runs_eagerly_and_gives_the_same_tokens(tiny_target: Path, tiny_head: Path) -> None:
    with _llm(tiny_target, tiny_head, "tree", cuda_graphs=True) as llm:
        want = _tokens(llm)
        log = RoundLog(llm)
        assert not llm.engine.hook.graph_safe
        assert _tokens(llm) == want
        assert log.verified


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_steps_with_experts_are_captured_where_their_products_do_not_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, dtype: str
) -> None:
    target = tiny_deepseek_dir(tmp_path)
    head = tiny_eagle3_dir(tmp_path, target)
    results = []
    for cuda_graphs in (False, True):
        caplog.clear()
        with _llm(target, head, mode, cuda_graphs=cuda_graphs, dtype=dtype) as llm:
            results.append(_tokens(llm))
            captured = isinstance(llm.engine._decode_step, DecodeGraphs)
            assert captured == (cuda_graphs and dtype == "bfloat16")
            assert ("wait for the device" in caplog.text) == (cuda_graphs and not captured)
    assert results[0] == results[1]
