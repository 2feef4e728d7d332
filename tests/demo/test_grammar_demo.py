"""On the demo model, chain and tree keep plain decoding's tokens under a grammar (float32), and fewer forwards do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trtllm_tree import LLM, GuidedDecodingParams, SamplingParams

pytest.importorskip("xgrammar")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
    },
    "required": ["name", "age", "city"],
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9], a (Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
CHOICES = ["a number below ten", "a number above ten", "no number at all"]
PERSON = "Give me a JSON object with the keys name, age and city for an invented person."
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (PERSON, {"guided_decoding": GuidedDecodingParams(json=SCHEMA)}),
    (PERSON, {"guided_decoding": GuidedDecodingParams(json=SCHEMA), "temperature": 1.0, "seed": 7}),
    (
        "When did this century begin?",
        {"guided_decoding": GuidedDecodingParams(regex=DATE), "temperature": 0.8, "seed": 8},
    ),
    ("What is 12 * 13?", {"guided_decoding": GuidedDecodingParams(choice=CHOICES)}),
    ("Write a haiku about debugging.", {"max_tokens": 12}),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="in bfloat16 near-ties part, see test_lossless.py")
def test_chain_and_tree_give_the_tokens_of_plain_decoding_under_grammars(
    demo_llm: Callable[[str], LLM],
) -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt, _ in REQUESTS]
    params = [SamplingParams(**{"max_tokens": 40} | options) for _, options in REQUESTS]
    outputs = {kind: demo_llm(kind).generate(chats, params) for kind in ("plain", "chain", "tree")}
    tokens = {kind: [output.outputs[0].token_ids for output in each] for kind, each in outputs.items()}
    assert tokens["chain"] == tokens["plain"]
    assert tokens["tree"] == tokens["plain"]
    *governed, free = [output.outputs[0] for output in outputs["tree"]]
    assert [each.finish_reason for each in governed] == ["stop"] * 4
    for person in governed[:2]:
        value = json.loads(person.text)
        assert list(value) == ["name", "age", "city"]
        assert 2 <= len(value["name"]) <= 20
        assert value["age"] in range(1, 100)
        assert value["city"] in ("Paris", "Rome", "Oslo")
    assert re.fullmatch(DATE, governed[2].text)
    assert governed[3].text in CHOICES
    assert free.token_ids == demo_llm("tree").generate(chats[4], params[4]).outputs[0].token_ids
    forwards = {
        kind: sum(output.acceptance.target_forwards for output in each) for kind, each in outputs.items()
    }
    assert forwards["tree"] < forwards["plain"], "drafts should be accepted here too"
    assert sum(output.acceptance.num_pruned_drafts for output in outputs["tree"]) > 0
