"""The runtime double itself: it fits its signatures, decodes like transformers, and accounts for its blocks."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import tiny_deepseek_dir, tiny_eagle3_dir, tiny_llama_dir
from tests.doubles.tensorrt_llm import double_entries
from tests.doubles.tensorrt_llm.install import FURTHER, IMPLEMENTED, runtime_double
from trtllm_tree.hosts.tensorrt_llm.probe import probe

PROMPTS = [
    [5, 9, 23, 77, 41],
    [11, 3],
    [60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77],
]


@pytest.fixture(params=["new", "old"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with runtime_double(tmp_path / "double", request.param):
        yield request.param


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("double"))


@pytest.fixture(scope="module")
def head_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    return tiny_eagle3_dir(tmp_path_factory.mktemp("double_head"), target_dir)


@pytest.fixture(scope="module")
def expected(target_dir: Path) -> list[list[int]]:
    return greedy(target_dir, 20)


def greedy(model_dir: Path, max_tokens: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(max_tokens):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


@pytest.fixture(scope="module")
def latent_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_deepseek_dir(tmp_path_factory.mktemp("double_mla"))


def executor(target_dir: Path, **options: Any) -> Any:
    return import_module("tensorrt_llm._double.executor").Executor(target_dir, dtype=torch.float32, **options)


def chain_config(head_dir: Path) -> Any:
    return import_module("tensorrt_llm.llmapi.llm_args").Eagle3DecodingConfig(
        max_draft_len=3, speculative_model=str(head_dir), eagle3_layers_to_capture={0, 1, 2}
    )


def test_the_runtime_has_the_signatures_of_the_facts(layout: str) -> None:
    implemented = {name for names in IMPLEMENTED.values() for name in names}
    seen = set()
    for entry in double_entries(layout):
        if entry["name"] not in implemented:
            continue
        seen.add(entry["name"])
        value = getattr(import_module(entry["module"]), entry["name"])
        if entry["kind"] in ("class", "fields"):
            assert value.__module__ == entry["module"]
        if "base" in entry:
            module, _, base = entry["base"].rpartition(".")
            assert issubclass(value, getattr(import_module(module), base)), entry["name"]
        if entry["kind"] == "function":
            assert _parameters(value) == entry["params"], entry["name"]
        for name, params in (entry.get("methods", {}) | entry.get("classmethods", {})).items():
            found = _parameters(inspect.getattr_static(value, name))
            assert found == params, f"{entry['name']}.{name}: {found}"
        for name in entry.get("final", ()):
            assert getattr(getattr(value, name), "__final__", False), name
        for name in entry.get("properties", ()):
            assert isinstance(inspect.getattr_static(value, name), property), name
        if entry["kind"] == "fields":
            found = _fields(value)
            for field in entry["fields"]:
                name, _, default = field.partition("=")
                assert name in found, f"{entry['name']}.{name}"
                required = isinstance(found[name], _Required)
                assert required == (not default), f"{entry['name']}.{name}"
                assert required or found[name] == ast.literal_eval(default), f"{entry['name']}.{name}"
    further = {name for *_, names in FURTHER for name in names}
    assert implemented - seen <= further, "implemented without a signature"


def _parameters(function: Any) -> list[str]:
    function = getattr(function, "__func__", function)
    texts, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            texts.append("*")
            keyword_only = True
        bare = parameter.replace(annotation=parameter.empty)
        texts.append(str(bare).replace(" = ", "="))
    return texts


class _Required:
    """In the place of a default."""


def _fields(cls: Any) -> dict[str, Any]:
    if hasattr(cls, "model_fields"):
        return {
            name: _Required() if one.is_required() else one.default for name, one in cls.model_fields.items()
        }
    missing = inspect.Parameter.empty
    parameters = inspect.signature(cls).parameters.values()
    return {one.name: _Required() if one.default is missing else one.default for one in parameters}


def test_the_probe_finds_nothing_wrong(layout: str) -> None:
    assert probe().mismatches == ()


@pytest.mark.parametrize(
    "options",
    [{}, {"rope_fusion": False}, {"kv_manager": "v2"}, {"overlap": True}, {"max_chunk": 7}],
    ids=str,
)
def test_plain_decoding_is_that_of_transformers(
    layout: str, target_dir: Path, expected: list[list[int]], options: dict[str, Any]
) -> None:
    found = executor(target_dir, max_batch_size=2, **options)
    found.warmup()
    assert found.generate(PROMPTS, max_tokens=20) == expected
    assert found.kv_cache_manager.get_num_free_blocks() == found.kv_cache_manager.blocks_in_primary_pool - 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope_fusion": False, "kv_manager": "v2", "max_chunk": 7},
        {"overlap": True, "graph_batch_sizes": [1, 2], "max_chunk": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("separate", [False, True])
def test_the_built_in_chain_generates_the_same_tokens(
    layout: str,
    target_dir: Path,
    head_dir: Path,
    expected: list[list[int]],
    options: dict[str, Any],
    separate: bool,
) -> None:
    config = chain_config(head_dir)
    config._allow_separate_draft_kv_cache = separate
    found = executor(target_dir, speculative_config=config, max_batch_size=2, **options)
    found.warmup()
    requests = [found.submit(prompt, max_tokens=20) for prompt in PROMPTS]
    managers = found._kv_managers()
    dummies = [len(manager.ledger.blocks[1 << 32]) for manager in managers]
    while found.step():
        for manager in managers:
            owned = sum(len(blocks) for blocks in manager.ledger.blocks.values())
            assert owned + manager.get_num_free_blocks() == manager.blocks_in_primary_pool
            for request in found._active:
                if not request.pending_step and request.generated:
                    # What is cached, and the rows that a drafter may use behind it.
                    kept = len(request.tokens) - 1 + manager.num_extra_kv_tokens
                    assert manager.ledger.rows[request.py_request_id] == kept
    assert [request.generated for request in requests] == expected
    for manager, count in zip(managers, dummies, strict=True):
        assert manager.get_num_free_blocks() == manager.blocks_in_primary_pool - count


@pytest.mark.parametrize("kv_manager", ["v1", "v2"])
def test_latent_attention_is_that_of_transformers(
    layout: str, latent_dir: Path, tmp_path: Path, kv_manager: str
) -> None:
    config = chain_config(tiny_eagle3_dir(tmp_path, latent_dir))
    config._allow_separate_draft_kv_cache = True
    expected = greedy(latent_dir, 10)
    for speculative_config in (None, config):
        found = executor(
            latent_dir, speculative_config=speculative_config, max_batch_size=2, kv_manager=kv_manager
        )
        found.warmup()
        assert found.generate(PROMPTS, max_tokens=10) == expected
        buffers = found.kv_cache_manager.get_buffers(1, kv_layout="HND")
        assert buffers.shape[1:] == (1, 1, 16, 40), "one latent row a token"


def test_stale_offsets_name_another_requests_block(layout: str, target_dir: Path) -> None:
    found = executor(target_dir, stale_offsets=True, max_batch_size=2)
    requests = [found.submit(prompt, max_tokens=3) for prompt in PROMPTS[:2]]
    found.step()
    blocks = [found.kv_cache_manager.ledger.blocks[request.py_request_id] for request in requests]
    offsets = found.engine.eager.attn_metadata.kv_cache_block_offsets // 8
    assert offsets[0, 0, 0, :2].tolist() == [blocks[0][0], blocks[1][0]]
    assert offsets[0, 1, 0, :2].tolist() == [blocks[1][0], blocks[0][0]]


def test_fp8_blocks_hold_e4m3_codes(layout: str, target_dir: Path) -> None:
    found = executor(target_dir, kv_cache_dtype="fp8")
    request = found.submit(PROMPTS[0], max_tokens=4)
    found.step()
    view = found.kv_cache_manager.get_buffers(0, kv_layout="HND")
    assert view.dtype == torch.float8_e4m3fn
    block = found.kv_cache_manager.ledger.blocks[request.py_request_id][0]
    rows = view[block].float()
    assert rows[:, :, :5].isfinite().all() and rows[:, :, 5:].isnan().all()
    while found.step():
        pass
    assert len(request.generated) == 4


def test_the_llm_class_serves_text_and_streams(
    layout: str, target_dir: Path, expected: list[list[int]]
) -> None:
    package = import_module("tensorrt_llm")
    settings = {"kv_cache_config": {"tokens_per_block": 16}, "max_batch_size": 2, "max_seq_len": 128}
    with package.LLM(str(target_dir), **settings) as llm:
        params = package.SamplingParams(max_tokens=6, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params)
        assert [output.outputs[0].token_ids for output in outputs] == [tokens[:6] for tokens in expected]
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
        stop = package.SamplingParams(max_tokens=6, stop_token_ids=[expected[0][3]], ignore_eos=True)
        lengths = [
            len(one.outputs[0].token_ids) for one in llm.generate_async(PROMPTS[0], stop, streaming=True)
        ]
        assert lengths[-1] == 3 and lengths == sorted(lengths)
        assert llm.generate(PROMPTS[0], stop).outputs[0].stop_reason == expected[0][3]


def test_serve_reports_who_serves(
    layout: str,
    target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TLLM_FMHA_LIBS", raising=False)
    main = import_module("tensorrt_llm.commands.serve").main
    options = tmp_path / "options.yaml"
    options.write_text("max_batch_size: 3\n", encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        main(
            args=["serve", str(target_dir), "--extra_llm_api_options", str(options)], prog_name="trtllm-serve"
        )
    assert left.value.code == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["model"] == "tensorrt_llm._torch.models.modeling_llama.LlamaForCausalLM"
    assert report["fmha_libs"] == ["FallbackFmha"] and report["worker"] is None
    monkeypatch.setenv("TLLM_FMHA_LIBS", "+nobody")
    with pytest.raises(ValueError, match="nobody"):
        main(args=[str(target_dir)])
