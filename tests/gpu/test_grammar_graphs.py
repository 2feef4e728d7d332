"""Captured steps follow grammars as eager ones do: masks are filled before a replay, and read by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_decode_graphs import BUDGETS, MODES, PROMPTS, _llm
from trtllm_tree import GuidedDecodingParams, SamplingParams
from trtllm_tree.engine.decode_step import DecodeGraphs

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.gpu

# By request; as the short ones end, the rest is a batch of another kind.
GUIDES = [
    GuidedDecodingParams(regex="[a-f]+"),
    None,
    GuidedDecodingParams(json={"type": "array", "items": {"type": "integer"}}),
    None,
    GuidedDecodingParams(choice=["one legal way to say it"]),
]


@pytest.mark.parametrize("mode", MODES)
def test_replayed_steps_follow_grammars_as_eager_ones(mode: str, tiny_target: Path, tiny_head: Path) -> None:
    params = [
        SamplingParams(
            max_tokens=budget, ignore_eos=True, guided_decoding=guided, temperature=index % 2, seed=index
        )
        for index, (budget, guided) in enumerate(zip(BUDGETS, GUIDES, strict=True))
    ]
    results = []
    for cuda_graphs in (False, True):
        with _llm(tiny_target, tiny_head, mode, cuda_graphs=cuda_graphs) as llm:
            results.append([output.outputs[0] for output in llm.generate(PROMPTS, params)])
            step = llm.engine._decode_step
            if cuda_graphs:
                assert isinstance(step, DecodeGraphs)
                assert len({key[1:] for key in step._captured}) > 1
    eager, replayed = results
    assert [each.token_ids for each in eager] == [each.token_ids for each in replayed]
    assert set(eager[0].text) <= set("abcdef")
    assert "one legal way to say it".startswith(eager[4].text)
