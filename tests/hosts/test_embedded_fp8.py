"""An FP8 E4M3 cache on the embedded host: what is stored, who reads it, and what is refused.

In float32 arithmetic every mode reads the same rounded K/V but for keys in the middle of two values, so plain, chain
and tree must agree token for token, near-ties apart: only the cache is FP8.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM

from tests.builders import tiny_deepseek_dir, tiny_eagle3_dir, tiny_sliding_dir
from tests.hosts.embedded_engine import (
    CHAIN,
    MAIN,
    Build,
    Sizes,
    Truths,
    greedy,
    poison_pools,
    prompts_of,
)
from tests.oracles.fp8_e4m3 import rounding_attention, to_e4m3
from tests.oracles.known_continuation import KnownContinuation, RoundLog
from trtllm_tree import LLM, RequestOutput, SpeculativeConfig
from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.engine.kv_cache import CacheGroup, GroupSpec, KVCache, LayerSpec
from trtllm_tree.engine.model_runner import ModelRunner
from trtllm_tree.errors import ConfigError, Problem
from trtllm_tree.hosts.embedded.config import fp8_kernel_problems
from trtllm_tree.hosts.embedded.kv import DRAFT_GROUP, TARGET_GROUP, EmbeddedKVPool, build_cache

FP8 = torch.float8_e4m3fn
# Float32 over FP8 is the torch reference's, so these run on the CPU of a GPU machine too.
CPU = {"device": "cpu", "kv_cache_dtype": "fp8"}
ORACLE = "fp8_oracle"


@pytest.fixture(scope="module")
def fp8_plain(tiny_target: Path) -> Iterator[LLM]:
    """Plain decoding over an FP8 cache."""
    with LLM(str(tiny_target), dtype="float32", max_seq_len=512, **CPU) as llm:
        yield llm


@pytest.fixture(scope="module")
def fp8_truths(fp8_plain: LLM, truths: Truths) -> Truths:
    """Plain continuations of the usual prompts over an FP8 cache."""
    outputs = fp8_plain.generate(prompts_of(truths), greedy())
    return {p: o.outputs[0].token_ids for p, o in zip(truths, outputs, strict=True)}


def _cache(*, num_layers: int = 1, num_pages: int = 5) -> KVCache:
    layers = {f"target.{index}": LayerSpec(num_kv_heads=2, head_dim=8) for index in range(num_layers)}
    group = CacheGroup(
        GroupSpec("target", layers),
        num_pages=num_pages,
        page_size=16,
        num_slots=2,
        max_pages=4,
        dtype=FP8,
        device=torch.device("cpu"),
    )
    return KVCache([group])


# What is stored.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_rows_are_rounded_once_and_saturate(dtype: torch.dtype, device: str) -> None:
    edges = [0.0, -0.0, 1.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 1.0625, 1.1875, 448.0, 449.0, 464.0, 480.0, 1e4]
    edges += [3e4, torch.inf]
    special = torch.tensor([*edges, *[-x for x in edges], torch.nan, 17.0])
    noise = torch.randn(30, 2, 8, generator=torch.Generator().manual_seed(0)) * 100
    k = torch.cat([special.view(2, 2, 8), noise]).to(dtype)
    v = k.flip(0)
    layers = {"draft.0": LayerSpec(num_kv_heads=2, head_dim=8)}
    sizes = {"num_tokens": 64, "page_size": 16, "max_batch_size": 1, "max_extent": 64}
    cache = build_cache(layers, None, **sizes, dtype=FP8, device=torch.device(device))
    slots = torch.arange(16, 16 + len(k), dtype=torch.int32, device=device)
    views = cache.write("draft.0", slots, k.to(device), v.to(device))
    for view, rows in zip(views, (k, v), strict=True):
        assert view is not None and view.dtype == FP8
        stored = view[1:3].transpose(1, 2).flatten(0, 1).float().cpu()
        torch.testing.assert_close(stored, to_e4m3(rows.float()), rtol=0, atol=0, equal_nan=True)
        assert stored.isnan().sum() == 1, "only NaN is stored as NaN"
        assert stored.nan_to_num().abs().max() == 448
        assert not view[0].float().any() and not view[3:].float().any(), "a row landed elsewhere"


def test_ten_thousand_is_stored_as_448() -> None:
    cache = _cache()
    big = torch.full((1, 2, 8), 1e4)
    k_cache, v_cache = cache.write("target.0", torch.tensor([17], dtype=torch.int32), big, -big)
    assert v_cache is not None
    assert k_cache[1, :, 1].float().unique().tolist() == [448.0]
    assert v_cache[1, :, 1].float().unique().tolist() == [-448.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_holds_the_rounding_of_what_a_cache_of_the_models_dtype_holds(
    tiny_target: Path, truths: Truths, dtype: str
) -> None:
    """In the first layer, whose K/V no attention has touched; 40 prompt rows and a chunk border."""
    pools = {}
    for kv_cache_dtype in ("auto", "fp8"):
        llm = LLM(
            str(tiny_target), dtype=dtype, device="cpu", kv_cache_dtype=kv_cache_dtype, max_num_tokens=24
        )
        prompt = next(p for p in prompts_of(truths) if len(p) == 40)
        request = llm.engine.add_request(prompt, greedy(1))
        while request.is_prefilling:
            llm.engine.step()
        pools[kv_cache_dtype] = llm.engine.cache.groups[0].pools["target.0"]
    assert pools["fp8"].dtype == FP8
    written = pools["auto"].float().abs().sum(dim=(1, 2, 4)) > 0
    assert written.sum() == 40
    torch.testing.assert_close(pools["fp8"].float(), to_e4m3(pools["auto"].float()), rtol=0, atol=0)


def test_target_and_draft_pools_are_fp8_and_take_a_quarter_of_float32(build: Build) -> None:
    def num_bytes(**options: Any) -> dict[str, int]:
        groups = build(MAIN, **options).engine.cache.groups
        return {g.name: sum(pool.nbytes for pool in g.pools.values()) for g in groups}

    small, large = num_bytes(**CPU), num_bytes(device="cpu")
    assert set(small) == {TARGET_GROUP, DRAFT_GROUP}
    assert {name: 4 * count for name, count in small.items()} == large


# Who reads it.


AttentionInterface.register(ORACLE, rounding_attention)


def assert_tokens(outputs: Sequence[RequestOutput], truths: Truths, target: Path, length: int = 999) -> None:
    """The truths' tokens, or a first divergence where both tokens nearly tie in float64 over rounded K/V.

    Float32 products of other shapes differ in the last bit. A key that lies in the middle of two E4M3 values is then
    stored as the other one, an eighth away, which moved these models' logits (up to 10) by 0.23 on one machine.
    """
    assert (
        sum(o.outputs[0].token_ids == t[:length] for o, t in zip(outputs, truths.values(), strict=True)) > 1
    )
    for (prompt, truth), output in zip(truths.items(), outputs, strict=True):
        want, got = truth[:length], output.outputs[0].token_ids
        assert len(got) == len(want) or got[-1] != want[min(len(got), len(want)) - 1]
        at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
        if at is None:
            continue
        model = AutoModelForCausalLM.from_pretrained(target, attn_implementation=ORACLE, dtype=torch.float64)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *want[:at]]])).logits[0, -1]
        assert (logits.max() - logits[[want[at], got[at]]]).max() < 0.5, (prompt, at)


def test_logits_are_those_of_a_model_whose_keys_and_values_are_rounded(
    fp8_plain: LLM, fp8_truths: Truths, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own forward of the finished sequence, without a cache: prefill's last row and every decode row."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target, attn_implementation=ORACLE, dtype=torch.float64)
    forward, logits = ModelRunner.forward, []

    def recorded(self: ModelRunner, *args: Any) -> torch.Tensor:
        logits.append(forward(self, *args)[-1].clone())
        return logits[-1][None]

    monkeypatch.setattr(ModelRunner, "forward", recorded)
    differs = []
    for prompt in ([3, 5, 7, 11], next(p for p in prompts_of(fp8_truths) if len(p) == 31)):
        logits.clear()
        tokens = fp8_plain.generate(prompt, greedy(24)).outputs[0].token_ids
        with torch.inference_mode():
            want = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert len(logits) == len(want) == 24
        differs.append((torch.stack(logits) - want).abs().amax(dim=1))
    # A key within float32's error of the middle of two E4M3 values may be stored as the other one.
    assert torch.cat(differs).median() < 1e-4
    assert torch.cat(differs).max() < 1e-2


@pytest.mark.parametrize("sizes", [CHAIN, (2, 3, 6), MAIN, (8, 3, 16)], ids=str)
def test_chain_and_tree_give_the_tokens_of_plain_decoding_over_the_same_cache(
    build: Build, fp8_truths: Truths, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    llm = build(sizes, **CPU)
    KnownContinuation(llm, fp8_truths, monkeypatch)
    log = RoundLog(llm)
    poison_pools(llm.engine)
    assert_tokens(llm.generate(prompts_of(fp8_truths), greedy()), fp8_truths, tiny_target)
    assert max(log.accept_lens) >= min(sizes[1] + 1, sizes[2], 5)
    assert log.has_moved_rows == (sizes[0] > 1)


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_a_random_head_over_an_fp8_cache_changes_no_token(
    build: Build, fp8_truths: Truths, tiny_target: Path, sizes: Sizes
) -> None:
    outputs = build(sizes, **CPU).generate(prompts_of(fp8_truths), greedy(20))
    assert_tokens(outputs, fp8_truths, tiny_target, 20)


@pytest.mark.parametrize("kind", ["deepseek", "gemma3", "gpt_oss"])
def test_latent_rows_sliding_windows_and_sinks_go_with_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    target = tiny_deepseek_dir(tmp_path) if kind == "deepseek" else tiny_sliding_dir(tmp_path, kind)
    head = str(tiny_eagle3_dir(tmp_path, target))
    options = {"dtype": "float32", "max_seq_len": 128, **CPU}
    prompts = [[7] * 19, list(range(40, 75)), [3]]
    with LLM(str(target), **options) as llm:
        assert llm.engine.cache.groups[0].pools["target.0"].dtype == FP8
        plain = {tuple(p): llm.generate(p, greedy(24)).outputs[0].token_ids for p in prompts}
    for topk, steps, nodes in (CHAIN, (3, 4, 20)):
        config = SpeculativeConfig(tree_topk=topk, num_steps=steps, num_nodes=nodes, speculative_model=head)
        with LLM(str(target), speculative_config=config, **options) as llm:
            KnownContinuation(llm, plain, monkeypatch)
            poison_pools(llm.engine)
            outputs = llm.generate(prompts, greedy(24))
            assert [output.outputs[0].token_ids for output in outputs] == list(plain.values())
            assert max(max(output.acceptance.accept_lens) for output in outputs) >= 4


def test_the_rounding_shows(fp8_truths: Truths, truths: Truths) -> None:
    """Else the equalities above would say nothing about FP8."""
    assert fp8_truths != truths


@pytest.mark.parametrize("sizes", [CHAIN, MAIN], ids=str)
def test_a_chunked_prompt_reads_its_own_rows_from_the_cache_too(
    build: Build, fp8_truths: Truths, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    llm = build(sizes, max_num_tokens=13, tokens_per_block=32, **CPU)
    KnownContinuation(llm, fp8_truths, monkeypatch)
    outputs = llm.generate(prompts_of(fp8_truths), greedy(40))
    assert_tokens(outputs, fp8_truths, tiny_target, 40)


def test_a_model_whose_values_overflow_fp8_still_gives_numbers(tiny_target: Path, tmp_path: Path) -> None:
    """Values of some thousands: the norms behind keep the stream finite, and what is stored is +-448."""
    model_dir = tmp_path / "loud"
    shutil.copytree(tiny_target, model_dir)
    weights = load_file(model_dir / "model.safetensors")
    for name in weights:
        if name.endswith("v_proj.weight"):
            weights[name] *= 3e3
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(model_dir), dtype="float32", max_seq_len=128, **CPU) as llm:
        output = llm.generate([5, 6, 7, 8], greedy(12))
        assert output.error is None and len(output.outputs[0].token_ids) == 12
        stored = torch.cat([pool[:, 1].float() for pool in llm.engine.cache.groups[0].pools.values()])
    assert not stored.isnan().any()
    assert (stored.abs() == 448).sum() > (stored != 0).sum() / 2


def test_compaction_moves_fp8_rows_bit_for_bit() -> None:
    """Every byte value, NaN's included, through the engine's pools; the draft's do not move."""
    layers = {f"target.{index}": LayerSpec(num_kv_heads=2, head_dim=12) for index in range(3)}
    sizes = {"num_tokens": 160, "page_size": 16, "max_batch_size": 2, "max_extent": 64}
    cache = build_cache(layers, LayerSpec(1, 16), **sizes, dtype=FP8, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    target, draft = cache.groups
    for group in cache.groups:
        for pool in group.pools.values():
            pool.view(torch.uint8).random_(256, generator=generator)
    before = {name: pool.view(torch.uint8).clone() for g in cache.groups for name, pool in g.pools.items()}
    slots = torch.stack([torch.arange(19, 27), torch.arange(60, 68)]).int().unsqueeze(0)
    path = torch.full((2, 8), -1, dtype=torch.int32)
    path[0, :4], path[1, :3] = torch.tensor([0, 2, 3, 7]), torch.tensor([0, 1, 5])
    KVCompactor(EmbeddedKVPool(cache)).compact_verify_window(path, slots, max_depth=6)

    for name, pool in target.pools.items():
        # [slots, K and V, Hkv, D]
        rows, was = (x.permute(0, 3, 1, 2, 4).flatten(0, 1) for x in (pool.view(torch.uint8), before[name]))
        want = was.clone()
        for to_slot, from_slot in {20: 21, 21: 22, 22: 26, 62: 65}.items():
            want[to_slot] = was[from_slot]
        assert torch.equal(rows, want)
    for name, pool in draft.pools.items():
        assert torch.equal(pool.view(torch.uint8), before[name])


# What is refused.


def _problems(target: Path, head: Path | None = None, **options: Any) -> tuple[Problem, ...]:
    config = None if head is None else SpeculativeConfig(speculative_model=str(head))
    with pytest.raises(ConfigError) as caught:
        LLM(str(target), speculative_config=config, device="cpu", **options)
    return caught.value.problems


@pytest.mark.parametrize("name", ["nvfp4", "int8", "fp8_e5m2", "bfloat", 8])
def test_other_cache_dtypes_are_refused_by_name(tiny_target: Path, name: object) -> None:
    (problem,) = _problems(tiny_target, kv_cache_dtype=name)
    assert problem.option == "kv_cache_dtype" and problem.value == name
    assert "auto (the model's dtype) or fp8 (E4M3, unscaled)" in problem.rule


def test_scales_of_target_and_head_are_refused_with_every_other_limit_before_any_weight_is_loaded(
    tiny_target: Path, tiny_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(self: object, *_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    target, head = tmp_path / "target", tmp_path / "head"
    shutil.copytree(tiny_target, target)
    shutil.copytree(tiny_head, head)
    scale = {"model.layers.2.self_attn.k_proj.k_scale": torch.tensor(0.5)}
    save_file(scale, target / "scales.safetensors")
    settings = {"quantization": {"kv_cache_quant_algo": "INT8"}}
    (head / "hf_quant_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "__init__", forbidden)
        problems = _problems(target, head, kv_cache_dtype="fp8", max_seq_len=10**6)
    assert {(problem.option, problem.value) for problem in problems} == {
        ("max_seq_len", 10**6),
        ("model: model.layers.2.self_attn.k_proj.k_scale", 0.5),
        ("speculative_model: hf_quant_config.json: quantization.kv_cache_quant_algo", "INT8"),
    }
    # A cache of the model's dtype has no use for scales.
    with LLM(str(target), device="cpu", max_seq_len=64) as llm:
        assert llm.generate([5, 6], greedy(2)).error is None


def test_float32_over_fp8_is_the_torch_references_alone(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    (problem,) = _problems(tiny_target, kv_cache_dtype="fp8", dtype="float32")
    assert "dtype is float32" in problem.rule and "dtype to bfloat16" in problem.remedy


@pytest.mark.parametrize(
    ("dtype", "capability", "says"),
    [
        (torch.bfloat16, (9, 0), []),
        (torch.float16, (8, 9), []),
        (torch.bfloat16, None, []),
        (torch.float32, (9, 0), ["dtype is float32"]),
        (torch.bfloat16, (8, 0), ["needs compute capability 8.9, and this GPU has 8.0"]),
        (torch.float32, (8, 6), ["dtype is float32", "this GPU has 8.6"]),
    ],
)
def test_kernels_read_fp8_under_16_bits_and_from_sm89_on(
    dtype: torch.dtype, capability: tuple[int, int] | None, says: list[str]
) -> None:
    rules = [problem.rule for problem in fp8_kernel_problems(dtype, capability)]
    assert len(rules) == len(says) and all(part in rule for part, rule in zip(says, rules, strict=True))
