"""Latent attention (MLA) on the embedded host: transformers' DeepSeek-V3, absorbed, over a cache of latent rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from tests.builders import tiny_deepseek_dir, tiny_eagle3_dir
from tests.hosts.conftest import PROMPT_LENGTHS
from tests.hosts.embedded_engine import (
    CHAIN,
    MAIN,
    Sizes,
    Truths,
    assert_all_returned,
    greedy,
    num_free,
    poison_pools,
    prompts_of,
)
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from trtllm_tree import LLM, SpeculativeConfig
from trtllm_tree.attention.base import LeafShape
from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.attention.leaves.triton import TritonLeaf
from trtllm_tree.engine.chain_attention import PrefillAttention
from trtllm_tree.engine.kv_cache import CacheGroup, GroupSpec, KVCache, LayerSpec
from trtllm_tree.engine.mla_attention import LatentAttention, latent_layer_spec
from trtllm_tree.engine.model_runner import ModelRunner, target_layer, target_layer_specs
from trtllm_tree.engine.ports import ForwardBatch, Segment
from trtllm_tree.errors import UnsupportedError
from trtllm_tree.hosts.embedded import host
from trtllm_tree.hosts.embedded.attention import default_leaf
from trtllm_tree.support.report import Refused, Supported, TreeSupport

QUERIES = {"q_lora": 24, "q_direct": None}
PAGE_SIZE = 16
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


@pytest.fixture(scope="module", params=QUERIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V3 with and without a low-rank query."""
    root = tmp_path_factory.mktemp("deepseek")
    return tiny_deepseek_dir(root, q_lora_rank=QUERIES[request.param])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return tiny_eagle3_dir(tmp_path_factory.mktemp("deepseek_head"), target)


@pytest.fixture(scope="module")
def truths(target: Path, device: str) -> Iterator[Truths]:
    """Prompts around page borders, and their plain continuations."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    with LLM(str(target), device=device, dtype="float32", max_seq_len=512) as llm:
        outputs = llm.generate(prompts, greedy())
    yield {tuple(p): o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)}


@pytest.fixture
def build(target: Path, head: Path, device: str) -> Callable[..., LLM]:
    def make(sizes: Sizes, **options: Any) -> LLM:
        topk, steps, nodes = sizes
        config = SpeculativeConfig(
            tree_topk=topk, num_steps=steps, num_nodes=nodes, speculative_model=str(head)
        )
        defaults = {"device": device, "dtype": "float32", "max_seq_len": 256, "cuda_graphs": False}
        return LLM(str(target), speculative_config=config, **defaults | options)

    return make


# Plain, chain and tree.


def _eager(target: Path, dtype: torch.dtype) -> Any:
    """transformers' own model with its own attention."""
    return AutoModelForCausalLM.from_pretrained(
        target, attn_implementation="eager", dtype=dtype, local_files_only=True
    )


def test_plain_decoding_gives_the_tokens_of_transformers(target: Path, device: str, truths: Truths) -> None:
    model = _eager(target, torch.float32).to(device)
    for prompt, tokens in truths.items():
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]], device=device)).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert len({token for tokens in truths.values() for token in tokens}) > 100, "decoding does not wander"


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("sizes", [CHAIN, (2, 3, 6), MAIN, (4, 5, 64)], ids=str)
def test_chains_and_trees_give_plain_decodings_tokens(
    build: Callable[..., LLM],
    truths: Truths,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes,
    page_size: int,
) -> None:
    """Eight prompts at once, prefilled in chunks; accepted paths are long and branch; unwritten KV rows are NaN."""
    llm = build(sizes, tokens_per_block=page_size, max_num_tokens=13)
    KnownContinuation(llm, truths, monkeypatch)
    log = RoundLog(llm)
    poison_pools(llm.engine)
    before = num_free(llm.engine)
    outputs = llm.generate(prompts_of(truths), greedy(40))
    assert [output.outputs[0].token_ids for output in outputs] == [t[:40] for t in truths.values()]
    assert_all_returned(llm, before)

    # What the stress is for really happened.
    assert max(log.accept_lens) >= min(sizes[1] + 1, 4)
    assert max(len(lengths) for _, lengths, _ in log.verified) > 4
    assert log.has_moved_rows == (sizes[0] > 1)


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_fp8_latent_rows_give_plain_decodings_tokens(
    build: Callable[..., LLM],
    truths: Truths,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes,
) -> None:
    """On a CPU, where arithmetic stays float32: every reader sees the same rounded rows."""
    options = {"device": "cpu", "kv_cache_dtype": "fp8", "max_seq_len": 256}
    with LLM(str(target), dtype="float32", **options) as llm:
        outputs = llm.generate(prompts_of(truths), greedy(40))
    rounded = {p: o.outputs[0].token_ids for p, o in zip(truths, outputs, strict=True)}
    assert [t[:40] for t in truths.values()] != list(rounded.values()), "FP8 changes nothing"
    llm = build(sizes, **options)
    assert {pool.dtype for pool in llm.engine.cache.groups[0].pools.values()} == {torch.float8_e4m3fn}
    KnownContinuation(llm, rounded, monkeypatch)
    log = RoundLog(llm)
    outputs = llm.generate(prompts_of(truths), greedy(40))
    assert [output.outputs[0].token_ids for output in outputs] == list(rounded.values())
    assert log.has_moved_rows == (sizes[0] > 1)


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_a_random_head_changes_no_token(build: Callable[..., LLM], truths: Truths, sizes: Sizes) -> None:
    outputs = build(sizes).generate(prompts_of(truths), greedy(20))
    assert [output.outputs[0].token_ids for output in outputs] == [t[:20] for t in truths.values()]


def test_the_target_caches_latent_rows_alone_and_the_head_keeps_its_keys_and_values(
    build: Callable[..., LLM],
) -> None:
    target_group, draft_group = build(MAIN, tokens_per_block=16).engine.cache.groups
    assert {pool.shape[1:] for pool in target_group.pools.values()} == {(1, 16, 32 + 8)}
    assert {pool.shape[1:] for pool in draft_group.pools.values()} == {(2, 2, 16, 16)}


# The absorbed form, module by module.


def _cache_of(layers: dict[str, LayerSpec], dtype: torch.dtype, num_tokens: int) -> KVCache:
    """Unwritten rows are NaN; pool slot 0 has pages for `num_tokens`."""
    group = CacheGroup(
        GroupSpec("target", layers),
        num_pages=6,
        page_size=PAGE_SIZE,
        num_slots=2,
        max_pages=5,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for pool in group.pools.values():
        pool.fill_(torch.nan)
    cache = KVCache([group])
    cache.reserve(0, num_tokens)
    return cache


def _prefill_batch(cache: KVCache, start: int, end: int, token_ids: list[int] | None = None) -> ForwardBatch:
    """Rows [start, end) of a prompt in pool slot 0."""
    ids = tuple(token_ids[start:end]) if token_ids else (0,) * (end - start)
    segment = Segment(0, 0, start, ids, ids, is_last=True)
    position = torch.arange(start, end)
    tables = tuple(group.page_table[:1] for group in cache.groups)
    page = tables[0][0, position // PAGE_SIZE]
    return ForwardBatch(
        token_ids=torch.tensor(ids),
        positions=position,
        write_slots=((page * PAGE_SIZE + position % PAGE_SIZE).int(),),
        page_tables=tables,
        attention=PrefillAttention([segment], torch.device("cpu")),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_lora_rank": None},
        {"rope_interleave": False},
        {"rope_parameters": YARN},
        {"attention_bias": True},
        {"qk_nope_head_dim": 40, "v_head_dim": 12, "num_attention_heads": 3, "num_key_value_heads": 3},
    ],
    ids=lambda options: "-".join(map(str, options)) or "default",
)
def test_the_absorbed_form_over_pages_is_transformers_eager_attention(options: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24}
    sizes |= {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    config = DeepseekV3Config(**sizes | options, attn_implementation="eager")
    torch.manual_seed(0)
    eager = deepseek.DeepseekV3Attention(config, layer_idx=0)
    for name, parameter in eager.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "layernorm" in name else 0.0, std=0.2)
    length = 37
    hidden = torch.randn(1, length, config.hidden_size)
    rotary = deepseek.DeepseekV3RotaryEmbedding(config)
    positions = torch.arange(length)[None]
    mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
    with torch.inference_mode():
        expected, _ = eager(hidden, rotary(hidden, positions), mask)
        absorbed, parts = LatentAttention(eager, target_layer(0)), []
        cache = _cache_of({target_layer(0): latent_layer_spec(config)}, torch.float32, length)
        for start, end in ((0, 20), (20, length)):
            rows = slice(start, end)
            batch = _prefill_batch(cache, start, end)
            embeddings = rotary(hidden, positions[:, rows])
            parts.append(absorbed(hidden[:, rows], embeddings, paged_batch=batch, paged_cache=cache)[0])
    assert expected.abs().mean() > 0.3
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=1e-4)


def test_features_are_the_streams_that_enter_the_layers(target: Path) -> None:
    """The dense first layer and those with experts."""
    runner = ModelRunner(target, dtype=torch.float32, device=torch.device("cpu"))
    prompt = list(range(40, 71))
    cache = _cache_of(target_layer_specs(runner.config), torch.float32, len(prompt))
    features = runner.keep_features([0, 1, 3], max_rows=64)
    model = _eager(target, torch.float32)
    with torch.inference_mode():
        logits = runner.forward(_prefill_batch(cache, 0, len(prompt), prompt), cache)
        truth = model(torch.tensor([prompt]), output_hidden_states=True)
    expected = torch.cat([truth.hidden_states[layer][0] for layer in (0, 1, 3)], dim=1)
    torch.testing.assert_close(features[: len(prompt)], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, truth.logits[0], atol=1e-3, rtol=1e-4)
    assert not features[len(prompt) :].any()


@pytest.fixture(scope="module")
def dense_16bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without experts: a router that rounds to another expert says nothing about attention."""
    root = tmp_path_factory.mktemp("deepseek_dense")
    return tiny_deepseek_dir(root, dtype=torch.bfloat16, first_k_dense_replace=4)


def _eager_logits(target: Path, dtype: torch.dtype, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return _eager(target, dtype)(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_absorbed_form_rounds_no_worse_than_transformers_expanded_one(
    dense_16bit: Path, dtype: torch.dtype
) -> None:
    prompt = list(range(40, 71))
    runner = ModelRunner(dense_16bit, dtype=dtype, device=torch.device("cpu"))
    cache = _cache_of(target_layer_specs(runner.config), dtype, len(prompt))
    with torch.inference_mode():
        logits = runner.forward(_prefill_batch(cache, 0, len(prompt), prompt), cache)
    truth = _eager_logits(dense_16bit, torch.float32, prompt)
    own, theirs = (
        (found - truth).square().mean().sqrt()
        for found in (logits, _eager_logits(dense_16bit, dtype, prompt))
    )
    assert 0 < own < 1.2 * theirs


def test_a_bfloat16_trees_tokens_are_near_the_float32_models_best(
    dense_16bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(50, 70))
    options = {"device": "cpu", "dtype": "bfloat16", "max_seq_len": 128}
    with LLM(str(dense_16bit), **options) as llm:
        plain = llm.generate(prompt, greedy(40)).outputs[0].token_ids
    config = SpeculativeConfig(
        tree_topk=4,
        num_steps=5,
        num_nodes=32,
        speculative_model=str(tiny_eagle3_dir(tmp_path, dense_16bit)),
    )
    llm = LLM(str(dense_16bit), speculative_config=config, **options)
    KnownContinuation(llm, {tuple(prompt): plain}, monkeypatch)
    log = RoundLog(llm)
    tokens = llm.generate(prompt, greedy(40)).outputs[0].token_ids
    assert log.has_moved_rows
    logits = _eager_logits(dense_16bit, torch.float32, [*prompt, *tokens])[len(prompt) - 1 : -1]
    gaps = logits.amax(dim=-1) - logits[torch.arange(40), torch.tensor(tokens)]
    assert gaps.max() < 0.5


# Who serves it, and who is refused.


def _latent_shape() -> LeafShape:
    return LeafShape(
        num_heads=4,
        num_kv_heads=1,
        head_dim=40,
        page_size=16,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        value_dim=32,
    )


def test_a_latent_cache_is_served_in_torch_where_our_kernel_refuses_it_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Refused("reads no latent rows")

    def answer(leaf: TritonLeaf) -> TreeSupport:
        return TreeSupport(refused, refused) if leaf._shape else TreeSupport(Supported(), Supported())

    monkeypatch.setattr(TritonLeaf, "tree_support", answer)
    with caplog.at_level(logging.INFO):
        leaf = default_leaf("cuda:0", _latent_shape())
        assert isinstance(default_leaf("cuda:0"), TritonLeaf)
    assert isinstance(leaf, ReferenceLeaf) and leaf.tree_support().verify == Supported()
    message = caplog.records[0].message
    assert "latent rows on cuda:0" in message and "triton: reads no latent rows" in message


def test_trees_are_resolved_over_the_targets_leaf_and_the_heads_own(
    build: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(host, "resolve_tree_support", lambda *leaves: asked.append(leaves))
    hook = build(MAIN).engine.hook
    ((target_leaf, draft_leaf, _),) = asked
    assert hook._cascade.leaf is target_leaf and hook._draft_model._cascade.leaf is draft_leaf
    assert target_leaf._shape.value_dim == 32 and target_leaf is not draft_leaf
    build(CHAIN)
    assert len(asked) == 1


def test_a_step_is_replayed_only_if_both_sides_can_be(
    build: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = build(MAIN).engine.hook
    answers = {}
    for target_safe in (True, False):
        for draft_safe in (True, False):
            monkeypatch.setattr(hook, "_decode_attention", _Safe(target_safe))
            monkeypatch.setattr(hook._draft_model, "_decode_attention", _Safe(draft_safe))
            answers[target_safe, draft_safe] = hook.graph_safe
    assert [pair for pair, safe in answers.items() if safe] == [(True, True)]


class _Safe:
    def __init__(self, graph_safe: bool) -> None:
        self.graph_safe = graph_safe


def test_other_latent_attention_and_quantised_weights_are_refused_by_name_together() -> None:
    config = DeepseekV2Config(kv_lora_rank=64)
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedError) as caught:
        target_layer_specs(config)
    assert [(problem.option, problem.value) for problem in caught.value.problems] == [
        ("model: model_type", "deepseek_v2"),
        ("model: quantization_config", "fp8"),
    ]
    assert all(word in str(caught.value) for word in ("kv_lora_rank", "deepseek_v3", "kv_b_proj"))
