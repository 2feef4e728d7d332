"""On the installed TensorRT-LLM a tree gives the chain's tokens and the chain plain decoding's, whatever else is on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.demo.test_lossless_fp8 import Fp8NearTie
from tests.tensorrt_llm.engines import (
    GREEDY,
    Job,
    NearTie,
    Pair,
    Result,
    chat_prompts,
    rank_lines,
    run,
)
from trtllm_tree.demo import resolve_target

pytestmark = [pytest.mark.tensorrt_llm, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
OPTIONS = {"max_batch_size": 4, "max_seq_len": 1024, "dtype": "bfloat16"}
KV_CACHE = {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.3}
# Variations of the engine that must not change a token.
VARIATIONS: dict[str, dict[str, Any]] = {
    "no overlap": {"options": OPTIONS | {"disable_overlap_scheduler": True}},
    "no graphs": {"options": OPTIONS | {"cuda_graph_config": None}},
    "no graphs, no overlap": {
        "options": OPTIONS | {"cuda_graph_config": None, "disable_overlap_scheduler": True}
    },
    "padded graphs": {
        "options": OPTIONS | {"cuda_graph_config": {"batch_sizes": [4], "enable_padding": True}}
    },
    "one by one": {"one_by_one": True},
    "block reuse": {"kv_cache": KV_CACHE | {"enable_block_reuse": True}, "rounds": 2},
    "small blocks": {"kv_cache": KV_CACHE | {"tokens_per_block": 16}},
    "greedy verify": {"environment": {"TLLM_TREE_VERIFY": "greedy"}},
}


@pytest.fixture(scope="module")
def plain(pair: Pair, prompts: list[list[int]]) -> Result:
    return run(_job(pair, "plain", prompts))


def _job(pair: Pair, kind: str, prompts: list[list[int]], **changes: Any) -> Job:
    fields: dict[str, Any] = {"options": OPTIONS, "kv_cache": KV_CACHE, "speculation": pair.speculation}
    return Job(pair.model, pair.head, kind, prompts, **fields | changes)


def test_tree_chain_and_plain_decoding_agree(
    pair: Pair, prompts: list[list[int]], plain: Result, near_tie: NearTie
) -> None:
    chain, tree = (run(_job(pair, kind, prompts)) for kind in ("chain", "tree"))
    near_tie.assert_same(plain, chain)
    near_tie.assert_same(plain, tree)
    near_tie.assert_same(chain, tree)
    tree.assert_fewer_steps()
    (line,) = rank_lines(tree.log)
    assert line.worker == "TreeEagleWorker" and line.libraries[0] == "TreeCascadeFmha"
    assert rank_lines(chain.log) == rank_lines(plain.log) == [], "only trees are ours"


def test_a_tree_from_the_targets_mtp_layer_gives_plain_tokens() -> None:
    if (model := os.environ.get("TLLM_TREE_TEST_MTP_MODEL")) is None:
        pytest.skip("needs TLLM_TREE_TEST_MTP_MODEL, a target with an MTP layer")
    prompts = chat_prompts(model, 6)
    job = Job(model, "", "plain", prompts, options=OPTIONS, kv_cache=KV_CACHE)
    plain, tree = run(job), run(replace(job, kind="mtp"))
    NearTie(model).assert_same(plain, tree)
    tree.assert_fewer_steps()
    (line,) = rank_lines(tree.log)
    assert line.worker == "TreeMTPEagleWorker" and line.libraries[0] == "TreeCascadeFmha"


@pytest.mark.parametrize("variation", VARIATIONS)
def test_a_tree_gives_plain_tokens_with(
    pair: Pair, prompts: list[list[int]], plain: Result, near_tie: NearTie, variation: str
) -> None:
    tree = run(_job(pair, "tree", prompts, **VARIATIONS[variation]))
    near_tie.assert_same(replace(plain, rounds=plain.rounds * len(tree.rounds)), tree)
    tree.assert_fewer_steps()


def test_a_prompt_that_is_prefilled_in_chunks(
    pair: Pair, prompts: list[list[int]], near_tie: NearTie
) -> None:
    long = [token for prompt in prompts for token in prompt] * 2
    options = OPTIONS | {"enable_chunked_prefill": True, "max_num_tokens": 256}
    wanted = [long[:700], prompts[0], long[100:750]]
    near_tie.assert_same(run(_job(pair, "plain", wanted)), run(_job(pair, "tree", wanted, options=options)))


def test_over_an_fp8_cache_a_tree_gives_the_chains_tokens(pair: Pair, prompts: list[list[int]]) -> None:
    kv_cache = KV_CACHE | {"dtype": "fp8"}
    chain, tree = (run(_job(pair, kind, prompts, kv_cache=kv_cache)) for kind in ("chain", "tree"))
    tree.assert_fewer_steps()
    parted = [
        (a["prompt_ids"], a["token_ids"], b["token_ids"])
        for a, b in zip(chain.rounds[0], tree.rounds[0], strict=True)
        if a["token_ids"] != b["token_ids"]
    ]
    print(f"{len(parted)} of {len(prompts)} prompts part")
    if Path(pair.model) != resolve_target("demo"):
        pytest.skip("how far rounding to FP8 moves a logit was measured on the demo model only")
    oracle = Fp8NearTie("cuda") if parted else None
    assert all(oracle.gap(*each) < 3 for each in parted if oracle is not None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_give_the_tokens_of_one(
    pair: Pair, prompts: list[list[int]], tiny_target: Path, tiny_head: Path
) -> None:
    # The demo's nine heads cannot be halved.
    if Path(pair.model) == resolve_target("demo"):
        pair = Pair(str(tiny_target), str(tiny_head))
        prompts = [[token % 300 for token in prompt] for prompt in prompts]
    one = run(_job(pair, "plain", prompts))
    two = run(_job(pair, "tree", prompts, options=OPTIONS | {"tensor_parallel_size": 2}))
    NearTie(pair.model).assert_same(one, two)
    assert [line.rank for line in rank_lines(two.log)] == [0, 1]


def test_seeds_decide_what_is_drawn(pair: Pair, prompts: list[list[int]]) -> None:
    seeded = GREEDY | {"temperature": 1.0, "seed": 7}
    again = run(_job(pair, "tree", prompts, sampling=seeded, rounds=2, one_by_one=True))
    assert [f["token_ids"] for f in again.rounds[0]] == [f["token_ids"] for f in again.rounds[1]]
    other = run(_job(pair, "tree", prompts, sampling=seeded | {"seed": 8}, one_by_one=True))
    assert sum(a == b for a, b in zip(again.token_ids, other.token_ids, strict=True)) < len(prompts) // 2


def test_rejection_sampling_accepts_drafts(pair: Pair, prompts: list[list[int]]) -> None:
    drawn = run(
        _job(
            pair,
            "tree",
            prompts,
            sampling=GREEDY | {"temperature": 0.7, "seed": 7},
            environment={"TLLM_TREE_VERIFY": "rejection"},
        )
    )
    assert all(len(tokens) == GREEDY["max_tokens"] for tokens in drawn.token_ids)
    drawn.assert_fewer_steps()
    (line,) = rank_lines(drawn.log)
    assert line.verify == "rejection"


@pytest.mark.parametrize("topk", [1, 4])
def test_the_drafter_facade_gives_plain_tokens(
    pair: Pair, prompts: list[list[int]], plain: Result, near_tie: NearTie, topk: int
) -> None:
    """The target drafts for itself: its chain is nearly always accepted."""
    job = _job(pair, "drafter", prompts, options=OPTIONS | {"disable_overlap_scheduler": True})
    drafted = run(replace(job, head=pair.model, sizes=(topk, 4, 5 if topk == 1 else 16)))
    near_tie.assert_same(plain, drafted)
    drafted.assert_fewer_steps()
