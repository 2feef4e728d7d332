"""Captured steps edit logits and return log-probabilities as eager ones do, each kind in graphs of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.sync_trap import waiting_fails
from tests.gpu.test_decode_graphs import BUDGETS, MODES, PROMPTS, _llm
from trtllm_tree import SamplingParams
from trtllm_tree.engine.decode_step import DecodeGraphs
from trtllm_tree.sampling.edits import LogitEdits
from trtllm_tree.sampling.logprobs import TargetLogprobs
from trtllm_tree.tree.topology import chain_parents
from trtllm_tree.tree.verify_batch import TreeVerifyBatch

pytestmark = pytest.mark.gpu

# By request; as the short ones end, the rest is a batch of another kind.
OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logprobs": 3},
    {"logit_bias": {40: 3.0, 41: -2.0}, "temperature": 0.9, "seed": 4},
    {"bad_words_ids": [[5, 6], [7]], "min_tokens": 9, "stop_token_ids": [40], "logprobs": 0},
    {},
    {"frequency_penalty": 1.1, "temperature": 0.7, "top_p": 0.9, "seed": 8},
]


@pytest.mark.parametrize("mode", MODES)
def test_replayed_steps_edit_and_score_as_eager_ones(mode: str, tiny_target: Path, tiny_head: Path) -> None:
    params = [
        SamplingParams(max_tokens=budget, ignore_eos=True, **options)
        for budget, options in zip(BUDGETS, OPTIONS, strict=True)
    ]
    results = []
    for cuda_graphs in (False, True):
        with _llm(tiny_target, tiny_head, mode, cuda_graphs=cuda_graphs) as llm:
            results.append([output.outputs[0] for output in llm.generate(PROMPTS, params)])
            step = llm.engine._decode_step
            if cuda_graphs:
                assert isinstance(step, DecodeGraphs)
                assert len({key[1:] for key in step._captured}) > 1
    for eager, replayed in zip(*results, strict=True):
        assert eager.token_ids == replayed.token_ids
        assert (eager.logprobs is None) == (replayed.logprobs is None)
        for one, other in zip(eager.logprobs or [], replayed.logprobs or [], strict=True):
            assert [*one] == [*other]
            values = [each.logprob for each in one.values()]
            assert values == pytest.approx([each.logprob for each in other.values()], abs=1e-4)


@pytest.mark.parametrize("shape", ["row", "chain", "tree"])
def test_no_edit_and_no_logprob_waits_for_the_device(shape: str) -> None:
    num_rows, vocab = (1 if shape == "row" else 5), 1000
    edits = LogitEdits(4, 3 * num_rows, vocab, device="cuda")
    logprobs = TargetLogprobs(edits)
    for slot in range(3):
        params = SamplingParams(
            repetition_penalty=1.2, logit_bias={5: 1.0}, min_tokens=4, frequency_penalty=0.5
        )
        edits.reset(slot, params, [1, 2, 3], stop_ids=[2], bad_words=[(4, 5), (6,)])
        edits.use_bitmask(slot, True)
        logprobs.reset(slot, 5)
    assert edits.bitmask.device.type == "cuda"
    edits.plan([0, 1, 2])
    logprobs.plan([0, 1, 2])
    logits = torch.randn(3 * num_rows, vocab, device="cuda")
    slots = torch.tensor([0, 1, 2], device="cuda")
    tokens = torch.ones(3, num_rows, dtype=torch.int32, device="cuda")
    positions = torch.arange(num_rows, device="cuda").repeat(3, 1)
    parents = chain_parents(num_rows, torch.device("cuda")).repeat(3, 1)
    mask = (2 ** (1 + positions) - 1).unsqueeze(2)
    tree = TreeVerifyBatch(parents=parents, depths=positions.int(), ancestor_mask=mask)

    def step() -> None:
        logprobs.keep(logits)
        window = None if shape == "row" else tokens
        edits.apply(logits, slots, window, tree if shape == "tree" else None, positions)
        logprobs.take(positions.int() if shape == "tree" else None, tokens)

    step()
    torch.cuda.synchronize()
    with waiting_fails():
        step()
