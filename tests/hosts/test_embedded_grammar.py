"""Structured output on the embedded engine: a tree keeps plain decoding's tokens, and none outside a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.embedded_engine import CHAIN, MAIN, Build, Sizes, Truths, greedy, num_free, prompts_of
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from trtllm_tree import (
    LLM,
    GuidedDecodingParams,
    RequestError,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
)

pytest.importorskip("xgrammar")

EOS = 2
ONLY = "one legal way: 0123456789"
# Numbers of one digit as an array, in objects that a random model cannot keep open for ever.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "sizes", "kind"],
}
GUIDES = {
    "json": GuidedDecodingParams(json=SCHEMA),
    "regex": GuidedDecodingParams(regex=r"([a-f]{2}-){1,6}[0-9]+\."),
    "choice": GuidedDecodingParams(choice=["a short one", "another", ONLY]),
    "grammar": GuidedDecodingParams(grammar='root ::= "(" root ")" | "(" [a-z]{3,5} ")"'),
    "json_object": GuidedDecodingParams(json_object=True),
    "one way": GuidedDecodingParams(choice=[ONLY]),
    "none": None,
    "sampled json": GuidedDecodingParams(json=SCHEMA),
}


def params_of(index: int) -> SamplingParams:
    """Of the index-th request of a batch: each another grammar, half of them sampled."""
    sampled = {"temperature": 1.0, "seed": 99 + index} if index % 2 else {}
    # White space is allowed almost everywhere, so a random model takes long.
    max_tokens = 180 if index == 7 else 50
    return greedy(max_tokens, guided_decoding=list(GUIDES.values())[index], **sampled)


def generate(llm: LLM, prompts: Sequence[list[int]]) -> list[RequestOutput]:
    return llm.generate(list(prompts), [params_of(index) for index in range(len(prompts))])


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(plain: LLM, truths: Truths) -> list[RequestOutput]:
    """Plain decoding's outputs, each request alone."""
    return [plain.generate(prompt, params_of(index)) for index, prompt in enumerate(prompts_of(truths))]


@pytest.fixture(scope="module")
def governed(alone: list[RequestOutput]) -> Truths:
    return {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in alone}


def test_outputs_of_plain_decoding_follow_their_grammars(alone: list[RequestOutput], truths: Truths) -> None:
    completions = {name: output.outputs[0] for name, output in zip(GUIDES, alone, strict=True)}
    ended = {name for name, each in completions.items() if each.finish_reason == "stop"}
    assert ended >= {"choice", "one way", "sampled json"}, "the greedy ones may run into max_tokens"
    assert all(completions[name].stop_reason == EOS for name in ended)
    assert re.fullmatch(r"([a-f]{2}-){0,6}([a-f]{1,2}|[0-9]+\.?)?", completions["regex"].text)
    assert completions["one way"].text == ONLY
    assert completions["choice"].text in GUIDES["choice"].choice
    assert re.fullmatch(r"\(+[a-z]*\)*", completions["grammar"].text)
    value = json.loads(completions["sampled json"].text)
    assert list(value) == ["name", "sizes", "kind"]
    assert 1 <= len(value["name"]) <= 4
    assert len(value["sizes"]) <= 3
    assert all(size in range(10) for size in value["sizes"])
    assert value["kind"] in ("cat", "dog")
    prompt = list(truths)[list(GUIDES).index("none")]
    assert completions["none"].token_ids == truths[prompt][:50]


@pytest.mark.parametrize("sizes", [CHAIN, (2, 3, 6), MAIN], ids=str)
def test_chain_and_tree_keep_the_tokens_of_plain_decoding_in_a_mixed_batch(
    build: Build, governed: Truths, plain: LLM, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    prompts = prompts_of(governed)
    assert tokens(generate(plain, prompts)) == list(governed.values())
    llm = build(sizes)
    free = num_free(llm.engine)
    KnownContinuation(llm, governed, monkeypatch, hit_rate=0.8)
    log = RoundLog(llm)
    outputs = generate(llm, prompts)
    assert tokens(outputs) == list(governed.values())
    assert max(log.accept_lens) >= 3, "the paths should be long"
    assert sizes == CHAIN or log.has_moved_rows
    pruned = {name: output.acceptance.num_pruned_drafts for name, output in zip(GUIDES, outputs, strict=True)}
    assert pruned.pop("none") == 0
    assert (any if sizes == CHAIN else all)(pruned.values())
    assert num_free(llm.engine) == free


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_a_grammar_that_ends_inside_the_path_ends_the_request_there(
    build: Build, truths: Truths, plain: LLM, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    llm, prompt = build(sizes), prompts_of(truths)[4]
    # ignore_eos cannot go on behind the end of a grammar either.
    params = greedy(40, guided_decoding=GuidedDecodingParams(choice=["abcdefgh"]))
    truth = plain.generate(prompt, params).outputs[0].token_ids
    assert truth[-1] == EOS
    # The drafter goes on behind the end, with what would come without a grammar.
    known = {tuple(prompt): truth + truths[tuple(prompt)]}
    KnownContinuation(llm, known, monkeypatch, hit_rate=1.0)
    log = RoundLog(llm)
    output = llm.generate(prompt, params)
    completion = output.outputs[0]
    assert completion.token_ids == truth
    assert completion.text == "abcdefgh"
    assert completion.length == len(truth)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", EOS)
    assert 1 + sum(output.acceptance.accept_lens) == len(truth)
    assert log.accept_lens[-1] > output.acceptance.accept_lens[-1]
    parts = list(llm.stream(prompt, params))
    assert "".join(part.outputs[0].text_diff for part in parts) == "abcdefgh"
    assert [token for part in parts for token in part.outputs[0].token_ids_diff] == truth


@pytest.mark.parametrize("sizes", [None, CHAIN, MAIN], ids=str)
def test_no_allowed_token_and_a_failing_matcher_end_their_own_request_only(
    build: Build, truths: Truths, plain: LLM, monkeypatch: pytest.MonkeyPatch, sizes: Sizes | None
) -> None:
    llm = plain if sizes is None else build(sizes)
    prompts = prompts_of(truths)[:3]
    params = [
        greedy(20),
        # Behind "ab" nothing but the end is allowed, and min_tokens forbids it.
        greedy(20, min_tokens=5, guided_decoding=GuidedDecodingParams(choice=["ab"])),
        greedy(20, guided_decoding=GuidedDecodingParams(regex="[a-f]+")),
    ]
    outputs = llm.generate(prompts, params)
    assert outputs[0].outputs[0].token_ids == truths[tuple(prompts[0])][:20]
    assert outputs[1].outputs[0].text == "ab"
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "guided_decoding" in str(outputs[1].error)
    assert "min_tokens" in str(outputs[1].error)
    assert re.fullmatch("[a-f]+", outputs[2].outputs[0].text)
    assert tokens(llm.generate(prompts, params)) == tokens(outputs)


@pytest.mark.parametrize("sizes", [(1, 4, 5), MAIN], ids=str)
def test_rejection_sampling_stays_within_a_grammar(
    tiny_target: Path, tiny_head: Path, device: str, truths: Truths, sizes: Sizes
) -> None:
    topk, steps, nodes = sizes
    config = SpeculativeConfig(
        tree_topk=topk,
        num_steps=steps,
        num_nodes=nodes,
        speculative_model=str(tiny_head),
        use_rejection_sampling=True,
    )
    guided = GuidedDecodingParams(regex=r"([a-f]{2}-){1,6}[0-9]\.")
    params = [
        greedy(60, temperature=temperature, top_p=0.9, seed=index, guided_decoding=guided)
        for index, temperature in enumerate((0.7, 1.0, 1.0, 1.5, 1.5))
    ]
    with LLM(
        str(tiny_target), speculative_config=config, device=device, dtype="float32", max_seq_len=256
    ) as llm:
        outputs = llm.generate(prompts_of(truths)[:5], params)
    assert all(re.fullmatch(guided.regex or "", output.outputs[0].text) for output in outputs)
    assert len({output.outputs[0].text for output in outputs}) > 1


def test_a_slot_that_followed_a_grammar_does_not_govern_the_next_request(plain: LLM, truths: Truths) -> None:
    prompt = prompts_of(truths)[1]
    plain.generate(prompt, greedy(8, guided_decoding=GuidedDecodingParams(regex="[a-f]+")))
    assert plain.generate(prompt, greedy(20)).outputs[0].token_ids == truths[tuple(prompt)][:20]


@pytest.mark.parametrize(
    ("guided", "reason"),
    [
        (GuidedDecodingParams(regex="a("), "does not compile"),
        (GuidedDecodingParams(json={"type": "array", "uniqueItems": True}), "uniqueItems is not held"),
        (GuidedDecodingParams(), "exactly one"),
        ({"json": {}}, "must be GuidedDecodingParams"),
    ],
    ids=str,
)
def test_a_grammar_that_cannot_be_followed_refuses_its_request_alone(
    plain: LLM, truths: Truths, guided: Any, reason: str
) -> None:
    prompts = prompts_of(truths)[:2]
    refused, served = plain.generate(prompts, [greedy(4, guided_decoding=guided), greedy(4)])
    assert isinstance(refused.error, RequestError)
    assert reason in str(refused.error)
    assert served.outputs[0].token_ids == truths[tuple(prompts[1])][:4]
