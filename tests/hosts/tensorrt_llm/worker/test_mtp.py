"""Trees from the target's own MTP layer over the runtime double: tokens, drafts, cache rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.tensorrt_llm.mtp_runs import SlowGlmMtp, glm_dir, slow_tree
from tests.hosts.tensorrt_llm.tree_runs import (
    MAIN,
    Sizes,
    embedded_tokens,
    tree_executor,
)
from tests.hosts.tensorrt_llm.worker.checks import (
    SAMPLED,
    assert_drafted_for_alike_in_company,
    assert_rounds_are_the_embedded_hosts,
    assert_rows_are_plain_decodings,
    sampled_configs,
)
from tests.hosts.tensorrt_llm.worker.runs import LENGTHS, PROMPTS, TOKENS, Rounds, run
from trtllm_tree import LLM, SamplingParams


@pytest.fixture(scope="module", params=[False, True], ids=["", "qk norm"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return glm_dir(tmp_path_factory.mktemp("glm"), use_qk_norm=request.param)


@pytest.fixture(scope="module")
def theirs(target: Path) -> Any:
    """Transformers' model, which knows no MTP layer."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def expected(theirs: Any) -> list[list[int]]:
    found = []
    for prompt, count in zip(PROMPTS, LENGTHS, strict=True):
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = theirs.generate(torch.tensor([prompt]), **options)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokens_per_block": 32, "kv_manager": "v2", "separate": True},
        {"tokens_per_block": 64, "overlap": True, "graph_batch_sizes": [1, 3]},
        {"rope_fusion": False, "overlap": True, "separate": True},
        {"kv_manager": "v2", "overlap": True, "max_chunk": 16, "stale_offsets": True},
    ],
    ids=["plain", "v2 pages of 32", "overlap pages of 64", "unfused", "v2 in chunks"],
)
def test_greedy_tokens_are_those_of_transformers(
    layout: str, target: Path, expected: list[list[int]], options: dict[str, Any]
) -> None:
    executor = tree_executor(target, None, max_batch_size=3, **options)
    requests = run(executor, PROMPTS)
    assert [request.generated for request in requests] == expected
    kept = [count for request in requests for count in request.accepted_history]
    assert max(kept) >= 2 and 0 in kept, "the drafts of this layer are neither always right nor always wrong"


@pytest.mark.parametrize("sizes", [(2, 3, 6), (8, 2, 17), (3, 1, 4)], ids=str)
def test_other_trees_generate_the_same(
    new_layout: None, target: Path, expected: list[list[int]], sizes: Sizes
) -> None:
    executor = tree_executor(target, None, sizes, max_batch_size=4, overlap=True)
    assert [request.generated for request in run(executor, PROMPTS)] == expected


@pytest.mark.parametrize(
    "options",
    [{}, {"separate": True, "rope_fusion": False}, {"max_chunk": 7}],
    ids=["shared", "separate", "chunks"],
)
def test_every_drafted_tree_is_the_slow_one(
    layout: str, target: Path, theirs: Any, options: dict[str, Any]
) -> None:
    """Every path by itself, over the whole sequence, from transformers' last hidden rows."""
    prompt, rounds, layer = PROMPTS[2], Rounds(), SlowGlmMtp(target)
    executor = tree_executor(target, None, **options)
    executor.model.spec_worker.spec_round.observer = rounds
    (request,) = run(executor, [prompt], counts=[TOKENS])
    text = [*prompt, *request.generated]
    with torch.inference_mode():
        hidden = theirs.model(torch.tensor([text])).last_hidden_state[0]
    length, compared, branches = len(prompt) + 1, 0, 0
    for tokens, parents, accepted in zip(rounds.tokens, rounds.parents, [*rounds.accepted, [0]], strict=True):
        if length > len(text):
            break
        wanted = slow_tree(layer, text[:length], hidden[: length - 1], MAIN)
        assert (tokens[0], parents[0]) == wanted
        length, compared = length + accepted[0], compared + 1
        branches += parents[0] != list(range(-1, MAIN[2] - 1))
    assert compared > TOKENS // 3 and branches


def test_a_request_is_drafted_for_alike_alone_and_beside_prompts_that_arrive(
    new_layout: None, target: Path
) -> None:
    assert_drafted_for_alike_in_company(target, None)


@pytest.mark.parametrize("options", [{}, {"kv_manager": "v2", "tokens_per_block": 32}], ids=["v1", "v2"])
def test_rows_behind_every_step_are_those_of_plain_decoding(
    layout: str, target: Path, options: dict[str, Any]
) -> None:
    assert_rows_are_plain_decodings(target, None, **options)


@pytest.mark.parametrize(
    "options", [{}, {"separate": True, "rope_fusion": False}], ids=["shared", "separate"]
)
def test_every_round_drafts_and_keeps_what_the_embedded_host_does(
    layout: str, target: Path, options: dict[str, Any]
) -> None:
    assert_rounds_are_the_embedded_hosts(target, None, **options)


@pytest.mark.parametrize("mode", ["gumbel", "rejection"])
def test_seeded_tokens_are_those_of_the_embedded_host(new_layout: None, target: Path, mode: str) -> None:
    """Sampled and greedy requests in one batch, captured or not, whatever the slots."""
    rejects = {"use_rejection_sampling": mode == "rejection"}
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options) for options in SAMPLED]
    wanted = embedded_tokens(target, None, PROMPTS[:4], params, **rejects)
    executor = tree_executor(target, None, max_batch_size=2, graph_batch_sizes=[2], overlap=True, **rejects)
    assert executor.model.spec_worker.verify == mode
    requests = run(executor, PROMPTS[:4], sampling=sampled_configs(), counts=[TOKENS] * 4)
    assert [request.generated for request in requests] == wanted
    assert any(count for request in requests for count in request.accepted_history)


def test_seeded_tokens_are_those_of_plain_decoding(new_layout: None, target: Path) -> None:
    """Noise is keyed by seed and position: a tree draws what our engine draws token by token."""
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options) for options in SAMPLED]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": 256, "max_batch_size": 4}
    with LLM(str(target), **options) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:4], params)]
    executor = tree_executor(target, None, max_batch_size=2, graph_batch_sizes=[2], overlap=True)
    requests = run(executor, PROMPTS[:4], sampling=sampled_configs(), counts=[TOKENS] * 4)
    assert [request.generated for request in requests] == wanted
    assert any(count for request in requests for count in request.accepted_history)
