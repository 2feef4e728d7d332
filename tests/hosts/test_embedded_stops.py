"""Stop conditions inside an accepted path: ids, text, usage and stream end at one token."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.hosts.embedded_engine import (
    CHAIN,
    MAIN,
    Build,
    Sizes,
    Truths,
    greedy,
)
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from trtllm_tree import LLM, RequestOutput, SamplingParams


def _generate_well_drafted(
    llm: LLM, truths: Truths, monkeypatch: pytest.MonkeyPatch, prompt: list[int], params: SamplingParams
) -> tuple[RequestOutput, RoundLog]:
    with monkeypatch.context() as patch:
        KnownContinuation(llm, truths, patch, hit_rate=1.0)
        log = RoundLog(llm)
        return llm.generate(prompt, params), log


def _end_inside_a_path(llm: LLM, truths: Truths, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """A prompt, and a token of its continuation with neighbours on both sides in one accepted path.

    With the token before it, it spells letters that stand nowhere before, so that they can be a stop string.
    """
    decode = llm.tokenizer.backend_tokenizer.decode
    for prompt, truth in ((list(prompt), truth) for prompt, truth in truths.items()):
        output, _ = _generate_well_drafted(llm, truths, monkeypatch, prompt, greedy())
        start = 0
        for length in output.acceptance.accept_lens:
            for end in range(start + 2, start + length):
                text, before = decode(truth[end - 1 : end + 1]), decode(truth[: end + 1])[:-1]
                if (
                    text.isascii()
                    and text.isprintable()
                    and text not in before
                    and truth[end] not in truth[:end]
                ):
                    return prompt, end
            start += length
    raise AssertionError("no prompt has such a token")


@pytest.mark.parametrize("condition", ["token", "string", "limit", "stop, then limit", "limit, then stop"])
@pytest.mark.parametrize("sizes", [CHAIN, (2, 3, 6), MAIN], ids=str)
def test_an_end_inside_an_accepted_path_cuts_ids_text_usage_and_stream_at_one_token(
    build: Build, truths: Truths, monkeypatch: pytest.MonkeyPatch, sizes: Sizes, condition: str
) -> None:
    llm = build(sizes)
    decode: Callable[[list[int]], str] = llm.tokenizer.backend_tokenizer.decode
    prompt, end = _end_inside_a_path(llm, truths, monkeypatch)
    truth = truths[tuple(prompt)]
    whole = decode(truth[: end + 1])
    stop_token, stop = truth[end], decode(truth[end - 1 : end + 1])
    before_stop = whole[: -len(stop)]
    params, text, reason = {
        "token": (greedy(stop_token_ids=[stop_token]), decode(truth[:end]), ("stop", stop_token)),
        "string": (greedy(stop=[stop]), before_stop, ("stop", stop)),
        "limit": (greedy(end + 1), whole, ("length", None)),
        "stop, then limit": (greedy(end + 2, stop=stop), before_stop, ("stop", stop)),
        "limit, then stop": (greedy(end, stop=stop), decode(truth[:end]), ("length", None)),
    }[condition]
    num_tokens = end if condition == "limit, then stop" else end + 1

    output, log = _generate_well_drafted(llm, truths, monkeypatch, prompt, params)
    completion = output.outputs[0]
    assert completion.token_ids == truth[:num_tokens]
    assert completion.length == num_tokens
    assert completion.text == text
    assert (completion.finish_reason, completion.stop_reason) == reason
    # The path went on behind the end, and its rest is counted nowhere.
    assert log.accept_lens[-1] > output.acceptance.accept_lens[-1] > 0
    assert 1 + sum(output.acceptance.accept_lens) == num_tokens

    with monkeypatch.context() as patch:
        KnownContinuation(llm, truths, patch, hit_rate=1.0)
        parts = list(llm.stream(prompt, params))
    assert "".join(part.outputs[0].text_diff for part in parts) == text
    assert [token for part in parts for token in part.outputs[0].token_ids_diff] == truth[:num_tokens]
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
