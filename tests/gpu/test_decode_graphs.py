"""Decode steps as CUDA graphs give the eager engine's tokens, for plain decoding, chains and trees (bugs C1, C2)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.builders import tiny_deepseek_dir, tiny_eagle3_dir
from tests.mtp_models import MTP_KINDS, tiny_mtp_dir
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
OPTIONS = {"device": "cuda", "max_batch_size": 6, "max_seq_len": 128, "tokens_per_block": 16}


def _llm(target: Path, head: Path, mode: str, *, cuda_graphs: bool, dtype: str = "float32") -> LLM:
    options = MODES[mode]
    config = None if options is None else SpeculativeConfig(speculative_model=str(head), **options)
    return LLM(str(target), speculative_config=config, dtype=dtype, cuda_graphs=cuda_graphs, **OPTIONS)


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
    # One request filters; when it has ended, the others only sample or are greedy.
    temperatures, top_ps = [0.8, 0.8, 0.0, 0.8, 0.0], [1.0, 0.9, 0.9, 1.0, 1.0]
    params = [
        SamplingParams(max_tokens=budget, ignore_eos=True, temperature=temperature, top_p=top_p, seed=i)
        for i, (budget, temperature, top_p) in enumerate(zip(BUDGETS, temperatures, top_ps, strict=True))
    ]
    results, kinds = [], set()
    for cuda_graphs in (False, True):
        with _llm(tiny_target, tiny_head, mode, cuda_graphs=cuda_graphs) as llm:
            results.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)])
            if cuda_graphs:
                kinds = {key[1] for key in llm.engine._decode_step._captured}  # type: ignore[attr-defined]
    assert results[0] == results[1]
    assert kinds == {"plain", "filtered"}


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


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("kind", MTP_KINDS)
def test_steps_that_draft_with_an_mtp_layer_are_captured(tmp_path: Path, kind: str, mode: str) -> None:
    # Grouped heads of a size that the leaf `triton` serves; another leaf's steps are not captured.
    sizes = {"head_dim": 64} if kind == "glm4_moe" else {}
    target = tiny_mtp_dir(tmp_path, kind, agrees=True, **sizes)
    config = SpeculativeConfig(decoding_type="MTP", **MODES[mode])
    results, accepted = [], []
    for cuda_graphs in (False, True):
        options = OPTIONS | {"dtype": "bfloat16", "cuda_graphs": cuda_graphs}
        with LLM(str(target), speculative_config=config, **options) as llm:
            params = [SamplingParams(max_tokens=budget, ignore_eos=True) for budget in BUDGETS]
            outputs = llm.generate(PROMPTS, params)
            results.append([output.outputs[0].token_ids for output in outputs])
            accepted += [length for output in outputs for length in output.acceptance.accept_lens]
            step = llm.engine._decode_step
            assert bool(isinstance(step, DecodeGraphs) and step._captured) == cuda_graphs
    assert results[0] == results[1]
    assert max(accepted) > 1, "no draft was accepted"
