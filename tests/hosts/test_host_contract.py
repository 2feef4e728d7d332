"""What holds on every host: one suite over the embedded engine and over TensorRT-LLM's runtime double.

Truth is what the embedded host says plainly, in float32. Hosts are opened by `LLM(model, host=...)`, as users do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trtllm_tree
from tests.hosts import contract_hosts as hosts
from tests.hosts.contract_hosts import EmbeddedHost, Host, Pair, Sizes
from tests.hosts.port_watch import PortWatch
from tests.hosts.tensorrt_llm.tree_runs import agreeing_pair, prompts_of
from trtllm_tree import LLM, ConfigError, RequestOutput, SamplingParams, UnsupportedError, config
from trtllm_tree.config.host_rules import HOSTS
from trtllm_tree.hosts.tensorrt_llm.symbols import SYMBOLS, Symbol

CHAIN: Sizes = (1, 4, 5)
TREE: Sizes = (4, 5, 20)
SIZES = {"plain": None, "chain": CHAIN, "tree": TREE}
# More than a batch of 3 holds, around page borders; they come and go at different steps.
PROMPTS = prompts_of(5, 31, 33, 64, 1, 40)
LENGTHS = (24, 9, 20, 3, 17, 24)
SAMPLED = (
    {"temperature": 0.8, "seed": 5},
    {},
    {"temperature": 1.3, "top_k": 3, "seed": 2**63 - 7},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02, "seed": 5},
)


# On a GPU of a size that our kernels take. Asked here: TensorRT-LLM's double hides the GPU.
HIDDEN_SIZE = 256 if torch.cuda.is_available() else 64


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target and a head that often agree."""
    return agreeing_pair(tmp_path_factory.mktemp("contract"), hidden_size=HIDDEN_SIZE)


@pytest.fixture(scope="module", params=hosts.HOST_NAMES)
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with hosts.running_host(request.param, tmp_path_factory.mktemp("double")) as found:
        yield found


@pytest.fixture(scope="module")
def llm(host: Host, pair: Pair) -> Iterator[LLM]:
    """The host with a tree."""
    with host.open(pair, TREE) as found:
        yield found


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def said(host: Host, pair: Pair, sizes: Sizes | None, params: list[SamplingParams], **options: Any) -> Any:
    with host.open(pair, sizes, **options) as llm:
        return tokens_of(llm.generate(PROMPTS[: len(params)], params))


@pytest.fixture(scope="module")
def truth(pair: Pair) -> list[list[int]]:
    """Plain continuations of 24 tokens."""
    return said(EmbeddedHost(), pair, None, [greedy(24)] * len(PROMPTS))


@pytest.fixture(scope="module")
def sampled_truth(pair: Pair) -> list[list[int]]:
    return said(EmbeddedHost(), pair, None, [greedy(16, **options) for options in SAMPLED])


# Tokens.


@pytest.mark.parametrize(("kind", "page_size"), [("plain", 32), ("chain", 32), ("tree", 32), ("tree", 64)])
def test_greedy_tokens_are_plain_decodings_whatever_drafts(
    host: Host, pair: Pair, truth: list[list[int]], kind: str, page_size: int
) -> None:
    """Unequal requests, more of them than a batch holds."""
    params = [greedy(length) for length in LENGTHS]
    with host.open(pair, SIZES[kind], tokens_per_block=page_size) as llm:
        outputs = llm.generate(PROMPTS, params)
    assert tokens_of(outputs) == [tokens[:length] for tokens, length in zip(truth, LENGTHS, strict=True)]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(LENGTHS)
    # On the double whoever is waited for drives all, so that only the first is seen step by step.
    kept = outputs[0].acceptance.accept_lens
    assert sum(kept) == LENGTHS[0] - 1 and (kind == "plain" or max(kept) >= 2), "nothing was accepted"


def test_seeded_tokens_are_plain_decodings_whatever_drafts(
    host: Host, pair: Pair, truth: list[list[int]], sampled_truth: list[list[int]]
) -> None:
    """Greedy and sampled requests in one batch. Without a tree TensorRT-LLM draws by itself."""
    wanted, plain = sampled_truth, [tokens[:16] for tokens in truth]
    assert [tokens == other for tokens, other in zip(wanted, plain, strict=False)] == [0, 1, 0, 0]
    params = [greedy(16, **options) for options in SAMPLED]
    for sizes in (CHAIN, TREE) if host.draws_chains else (TREE,):
        assert said(host, pair, sizes, params, max_batch_size=2) == wanted


def test_tokens_over_an_fp8_cache_are_plain_decodings_on_the_same_host(
    host: Host, pair: Pair, truth: list[list[int]]
) -> None:
    if host.name == "embedded" and torch.cuda.is_available():
        pytest.skip(
            "the kernels read FP8 under 16 bits, where tokens part at near-ties: tests/demo/test_lossless_fp8.py"
        )
    params = [greedy(16)] * 4
    plain, *drafted = (said(host, pair, sizes, params, kv_cache_dtype="fp8") for sizes in SIZES.values())
    assert drafted == [plain] * 2
    assert plain != [tokens[:16] for tokens in truth[:4]], "the cache is no coarser"


# Ends.


@pytest.fixture(scope="module")
def inner_end(pair: Pair, truth: list[list[int]]) -> tuple[list[int], list[int], int]:
    """A prompt, its continuation, and where in it a new token stands inside the accepted path of a tree."""
    with EmbeddedHost().open(pair, TREE) as llm:
        outputs = llm.generate(PROMPTS, greedy(24))
    for output, tokens in zip(outputs, truth, strict=True):
        first = 1
        for length in output.acceptance.accept_lens:
            inner = range(first, first + length - 1)
            if found := [end for end in inner if tokens[end] not in tokens[:end]]:
                return output.prompt_token_ids, tokens, found[-1]
            first += length
    raise AssertionError("no prompt has such a token")


def test_a_limit_inside_an_accepted_path_is_met_exactly(
    llm: LLM, inner_end: tuple[list[int], list[int], int]
) -> None:
    prompt, tokens, end = inner_end
    output = llm.generate(prompt, greedy(end + 1))
    assert output.outputs[0].token_ids == tokens[: end + 1]
    assert output.outputs[0].finish_reason == "length"
    assert sum(output.acceptance.accept_lens) == end


@pytest.mark.parametrize("kind", ["stop token", "eos"])
def test_a_stop_inside_an_accepted_path_ends_the_request_there(
    host: Host, pair: Pair, inner_end: tuple[list[int], list[int], int], tmp_path: Path, kind: str
) -> None:
    prompt, tokens, end = inner_end
    (target, head), params = pair, SamplingParams(max_tokens=24)
    if kind == "eos":
        target = Path(shutil.copytree(target, tmp_path / "target"))
        path = target / "generation_config.json"
        content = json.loads(path.read_text(encoding="utf-8")) | {"eos_token_id": tokens[end]}
        path.write_text(json.dumps(content), encoding="utf-8")
    else:
        params = greedy(24, stop_token_ids=[tokens[end]])
    with host.open((target, head), TREE) as llm:
        before = host.free_blocks(llm)
        stopped, other = llm.generate([prompt, PROMPTS[1]], [params, greedy(9)])
        completion = stopped.outputs[0]
        assert completion.token_ids == tokens[: end + host.shows_stop_tokens]
        assert completion.text == llm.tokenizer.decode(tokens[:end])
        assert completion.finish_reason == "stop" and other.outputs[0].length == 9
        assert host.free_blocks(llm) == before


# Requests that go another way.


def test_every_block_comes_back_after_many_requests_and_a_cancelled_one(
    host: Host, llm: LLM, truth: list[list[int]]
) -> None:
    before = host.free_blocks(llm)
    llm.generate(PROMPTS * 2, greedy(5))
    assert host.free_blocks(llm) == before
    stream = llm.stream(PROMPTS[0], greedy(100))
    shown = [next(stream).outputs[0].token_ids for _ in range(3)]
    assert shown[-1] == truth[0][: len(shown[-1])] and len(shown[-1]) > 2
    assert host.free_blocks(llm) != before
    stream.close()
    # TensorRT-LLM ends it in its next step.
    assert tokens_of(llm.generate(PROMPTS[1:3], greedy(9))) == [tokens[:9] for tokens in truth[1:3]]
    assert host.free_blocks(llm) == before


def test_a_bad_request_fails_alone_and_by_name(host: Host, llm: LLM, truth: list[list[int]]) -> None:
    before = host.free_blocks(llm)
    prompts = [PROMPTS[0], [], PROMPTS[1], PROMPTS[2], PROMPTS[3]]
    params = [greedy(7), greedy(7), greedy(7, temperature=-0.5), greedy(7, top_p=2.0, top_k=-3), greedy(3)]
    outputs = llm.generate(prompts, params)
    options = [{problem.option for problem in one.error.problems} if one.error else {} for one in outputs]
    assert options == [{}, {"prompt"}, {"temperature"}, {"top_k", "top_p"}, {}]
    assert [one.outputs[0].finish_reason for one in outputs] == ["length", *["error"] * 3, "length"]
    assert tokens_of(outputs) == [truth[0][:7], [], [], [], truth[3][:3]]
    assert host.free_blocks(llm) == before


# Refusals.


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((4, 5, 12), ["max_total_draft_tokens"]),
        ((4, 5, 400), ["max_total_draft_tokens"] * 2),
        ((17, 11, 300), ["dynamic_tree_max_topK", "max_draft_len", "max_total_draft_tokens"]),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused_alike_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, sizes: Sizes, options: list[str]
) -> None:
    asked: Any = SimpleNamespace(decoding_type="Eagle3", speculative_model="no/head", use_dynamic_tree=True)
    asked.dynamic_tree_max_topK, asked.max_draft_len = sizes[:2]
    asked.max_total_draft_tokens = sizes[2] - 1
    for loader in ("trtllm_tree.llm.TensorRtLlm", "trtllm_tree.hosts.embedded.host.build_host"):
        monkeypatch.setattr(loader, None)
    problems = []
    for name in HOSTS:
        with pytest.raises(ConfigError) as caught:
            LLM("no/model", host=name, speculative_config=asked)  # type: ignore[arg-type]
        problems.append(caught.value.problems)
    assert [problem.option for problem in problems[0]] == [f"speculative_config.{name}" for name in options]
    assert problems[1:] == problems[:1]


@pytest.mark.parametrize("host", hosts.HOST_NAMES[1:], indirect=True, scope="module")
@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: f"{symbol.feature}-{symbol.id}")
def test_a_symbol_that_is_gone_is_refused_at_startup_or_not_needed(
    host: Host, pair: Pair, symbol: Symbol
) -> None:
    refusals = []
    for made_by in (config.SpeculativeConfig, trtllm_tree.SpeculativeConfig):
        hosts.forget()
        with pytest.MonkeyPatch.context() as patch:
            hosts.remove(symbol, patch)
            try:
                with host.open(pair, None, speculative_config=made_by(**hosts.config_of(pair, TREE))) as llm:
                    assert llm.generate(PROMPTS[0], greedy(3)).outputs[0].length == 3
            except UnsupportedError as error:
                refusals.append([problem.option for problem in error.problems])
    hosts.forget()
    assert len(refusals) == 2 * hosts.is_needed(symbol)
    assert all(any(option.endswith(symbol.id) for option in options) for options in refusals)


# Ports.


@pytest.fixture(scope="module")
def embedded_calls(pair: Pair) -> PortWatch:
    return watched(EmbeddedHost(), pair, tokens_per_block=32)[0]


def watched(host: Host, pair: Pair, **options: Any) -> tuple[PortWatch, list[list[int]]]:
    """All calls of the ports for a greedy request and a sampled one behind it.

    On a CPU, where TensorRT-LLM's double runs: it hides the GPU, whose sums round otherwise.
    """
    options |= {"device": "cpu"} if host.name == "embedded" else {}
    with host.open(pair, TREE, max_batch_size=1, **options) as llm:
        watch = PortWatch(host.spec_round(llm))
        outputs = [llm.generate(PROMPTS[2], greedy(12, **SAMPLED[index])) for index in (1, 2)]
    return watch, tokens_of(outputs)


def test_draft_model_and_sampling_backend_are_called_alike_and_answer_alike(
    host: Host, pair: Pair, truth: list[list[int]], embedded_calls: PortWatch
) -> None:
    watch, tokens = watched(host, pair, tokens_per_block=64)
    assert tokens[0] == truth[2][:12] != tokens[1]
    names = {"fuse", "chain", "logits", *(f"lanes {step}" for step in range(1, TREE[1]))}
    assert {name for name, *_ in watch.drafts} == names
    assert [call[:3] for call in watch.drafts] == [call[:3] for call in embedded_calls.drafts]
    for (*_, rows), (*_, others) in zip(watch.drafts, embedded_calls.drafts, strict=True):
        torch.testing.assert_close(rows, others, rtol=1e-3, atol=1e-3)
    assert watch.verified == embedded_calls.verified
    assert any(path[0][1] > 1 for *_, path in watch.verified), "no step left the best path"


def test_the_kv_pools_regions_hold_the_rows_of_every_target_layer(
    host: Host, pair: Pair, truth: list[list[int]]
) -> None:
    """Behind some rounds of a tree they are what a prefill of the same tokens writes on the embedded host."""
    count, found = len(PROMPTS[1]) + 8, []
    for one, prompt, length in ((host, PROMPTS[1], 9), (EmbeddedHost(), [*PROMPTS[1], *truth[1][:8]], 1)):
        with one.open(pair, TREE, tokens_per_block=32) as llm:
            stream = llm.stream(prompt, greedy(60))
            while len(next(stream).outputs[0].token_ids) < length:
                pass
            found.append(hosts.cached_rows(one, llm)[:, :, :count])
    assert found[0].shape[0] == 8, "K and V of four layers"
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
