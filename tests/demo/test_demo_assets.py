"""The demo's model pair: conversion from GGUF, the cache, the checksums, and that the model really speaks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.builders import tiny_llama_dir
from trtllm_tree.demo import convert as convert_module
from trtllm_tree.demo import resolve_head, resolve_target, target
from trtllm_tree.errors import ConfigError


@pytest.fixture(scope="module")
def demo_dir() -> Path:
    """The real demo target in the user's cache; converted by the first test run of a machine."""
    try:
        target._find_gguf()
    except ConfigError:
        pytest.skip(f"the demo's GGUF file is not installed: {target.INSTALL_COMMAND}")
    return resolve_target("demo")


@pytest.fixture
def fake_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A demo whose conversion is instant; the returned function counts conversions."""
    gguf = tmp_path / "fake.gguf"
    gguf.write_bytes(b"GGUF and some weights")
    source = tmp_path / "source.safetensors"
    header = json.dumps({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    source.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    calls: list[Path] = []

    def fake_convert(gguf_path: Path, out_dir: Path, *, on_tensor: object = None) -> None:
        calls.append(gguf_path)
        for name in convert_module.HF_FILES:
            (out_dir / name).write_text("{}")
        (out_dir / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr(target, "convert", fake_convert)
    monkeypatch.setattr(target, "GGUF_SIZE", gguf.stat().st_size)
    monkeypatch.setattr(target, "GGUF_SHA256", target._sha256(gguf))
    monkeypatch.setattr(target, "TENSOR_DIGEST", target.tensor_digest(source))
    monkeypatch.setenv(target.GGUF_ENV, str(gguf))
    monkeypatch.setenv(target.CACHE_ENV, str(tmp_path / "cache"))
    return lambda: len(calls)


def _write_llama_cpp_gguf(hf_dir: Path, gguf_path: Path) -> None:
    """A GGUF of a tiny HF model the way llama.cpp writes it: F32 tensors, Q and K rows interleaved."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((hf_dir / "config.json").read_text())
    tokenizer = json.loads((hf_dir / "tokenizer.json").read_text())["model"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(gguf_path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    # The last merge would join two digits, were they not split before.
    words = [*sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)[:-1], "12"]
    writer.add_token_list(words)
    writer.add_token_types([3] * 3 + [1] * (config["vocab_size"] - 3))
    writer.add_token_merges([*(" ".join(pair) for pair in tokenizer["merges"][:-1]), "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output"},
        **{"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"},
        **{"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"},
        **{"embed_tokens": "token_embd", "norm": "output_norm"},
    }
    for name, weight in load_file(hf_dir / "model.safetensors").items():
        parts = name.split(".")
        count = {"q_proj": heads, "k_proj": kv_heads}.get(parts[-2])
        if count is not None:
            dim = weight.shape[0] // count
            # Head by head: channels 0, D/2, 1, D/2 + 1, ... take the rows 0, 1, 2, 3, ...
            order = [
                head * dim + half * dim // 2 + i
                for head in range(count)
                for i in range(dim // 2)
                for half in (0, 1)
            ]
            weight = weight[order]
        prefix = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        writer.add_tensor(f"{prefix}{names[parts[-2]]}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_gives_back_the_model_that_was_written_as_gguf(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # bfloat16 values survive the way through F32 and back exactly.
    source_dir = tiny_llama_dir(tmp_path, num_layers=2)
    original = AutoModelForCausalLM.from_pretrained(source_dir, dtype=torch.bfloat16)
    original.float().save_pretrained(source_dir)
    gguf_path = tmp_path / "tiny.gguf"
    _write_llama_cpp_gguf(source_dir, gguf_path)
    out_dir = tmp_path / "converted"
    out_dir.mkdir()
    seen: list[tuple[int, int]] = []

    convert_module.convert(gguf_path, out_dir, on_tensor=lambda done, total: seen.append((done, total)))

    assert sorted(path.name for path in out_dir.iterdir()) == sorted(convert_module.HF_FILES)
    assert seen == [(i, 20) for i in range(1, 21)]
    converted = AutoModelForCausalLM.from_pretrained(out_dir)
    assert converted.dtype == torch.bfloat16
    ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(converted.float()(ids).logits, original(ids).logits, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(out_dir)
    assert tokenizer("an 12<|im_end|>").input_ids == [
        tokenizer.convert_tokens_to_ids(t) for t in ("an", "Ġ", "1", "2", "<|im_end|>")
    ]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"


def test_the_demo_target_answers_and_its_weights_have_the_known_digest(demo_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert target.tensor_digest(demo_dir / "model.safetensors") == target.TENSOR_DIGEST
    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    model = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello, how are you?", [19556, 28, 638, 359, 346, 47]),
        ("2024 x 12", [34, 32, 34, 36, 1792, 216, 33, 34]),
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
    ],
)
def test_the_demo_tokenizer_gives_the_published_ids(demo_dir: Path, text: str, ids: list[int]) -> None:
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(demo_dir)(text).input_ids == ids


def test_the_demo_tokenizer_gives_text_back_unchanged(demo_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    assert len(tokenizer) == 49152
    for text in (
        "  def f(x):\n\treturn x ** 10 \n",
        "日本語 é 😀 naïve",
        "a<jupyter_code>b<|im_end|>",
        "don 't , 007",
    ):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_complete_cache_is_used_without_converting_or_looking_for_the_package(
    fake_demo: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = target.demo_target_dir()
    monkeypatch.setenv(target.GGUF_ENV, "/nowhere/at/all.gguf")
    assert target.demo_target_dir() == first
    assert fake_demo() == 1


@pytest.mark.parametrize("damaged", ["model.safetensors", "tokenizer.json", "trtllm_tree.json"])
def test_a_damaged_cache_is_converted_again(fake_demo: Callable[[], int], damaged: str) -> None:
    first = target.demo_target_dir()
    (first / damaged).unlink()
    again = target.demo_target_dir()
    assert again == first and (again / damaged).is_file()
    assert fake_demo() == 2
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_process_that_finishes_second_uses_the_first_ones_result(
    fake_demo: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_convert = target.convert

    def overtaken_convert(gguf_path: Path, out_dir: Path, *, on_tensor: object = None) -> None:
        monkeypatch.setattr(target, "convert", slow_convert)
        winner = target.demo_target_dir()
        (winner / "winner").write_text("first")
        slow_convert(gguf_path, out_dir)

    monkeypatch.setattr(target, "convert", overtaken_convert)
    result = target.demo_target_dir()
    assert (result / "winner").read_text() == "first"
    assert fake_demo() == 2
    assert [path.name for path in result.parent.iterdir()] == [result.name]


def test_tensors_that_differ_in_one_byte_are_refused_and_leave_no_cache(
    fake_demo: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(target, "TENSOR_DIGEST", "0" * 64)
    with pytest.raises(ConfigError, match="digest 0000"):
        target.demo_target_dir()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wrong_gguf_file_is_named_with_the_command_that_mends_it(
    fake_demo: Callable[[], int], tmp_path: Path
) -> None:
    gguf = tmp_path / "fake.gguf"
    for content in (b"shorter", b"GGUF and same weights"):
        gguf.write_bytes(content)
        with pytest.raises(ConfigError, match=re.escape(target.INSTALL_COMMAND)) as caught:
            target.demo_target_dir()
        assert str(gguf) in str(caught.value) and fake_demo() == 0


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    fake_demo: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(target.GGUF_ENV)
    monkeypatch.setattr(target, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ConfigError, match=re.escape(target.INSTALL_COMMAND)):
        target.demo_target_dir()


def test_an_unwritable_cache_names_its_variable(
    fake_demo: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(target.CACHE_ENV, str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=target.CACHE_ENV):
        target.demo_target_dir()


def test_the_digest_ignores_the_order_of_tensors_but_not_names_shapes_or_bytes(tmp_path: Path) -> None:
    def write(order: list[tuple[str, list[int], bytes]]) -> str:
        header, body = {}, b""
        for name, shape, content in order:
            header[name] = {
                "dtype": "U8",
                "shape": shape,
                "data_offsets": [len(body), len(body) + len(content)],
            }
            body += content
        text = json.dumps(header).encode()
        path = tmp_path / "some.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)
        return target.tensor_digest(path)

    digest = write([("a", [2], b"xy"), ("b", [1, 2], b"zw")])
    assert write([("b", [1, 2], b"zw"), ("a", [2], b"xy")]) == digest
    changed = (
        [("a", [2], b"xy"), ("b", [2, 1], b"zw")],
        [("a", [2], b"zw"), ("b", [1, 2], b"xy")],
        [("a", [2], b"xy")],
    )
    assert all(write(order) != digest for order in changed)


def test_the_demo_head_is_the_documented_one() -> None:
    head_dir = resolve_head("demo")
    readme = (head_dir / "README.md").read_text(encoding="utf-8")
    for name in ("config.json", "model.safetensors"):
        assert target._sha256(head_dir / name) in readme


def test_the_demo_head_fits_the_demo_target(demo_dir: Path) -> None:
    from trtllm_tree.support.head import head_problems

    assert head_problems(resolve_head("demo"), demo_dir) == []


def test_a_folder_is_taken_as_it_is_and_a_missing_one_names_its_option(tmp_path: Path) -> None:
    assert resolve_target(str(tmp_path)) == tmp_path
    assert resolve_head(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"^model = 'no/such/dir'"):
        resolve_target("no/such/dir")
    with pytest.raises(ConfigError, match=r"^speculative_model = 'no/such/dir'"):
        resolve_head("no/such/dir")


def test_importing_the_demo_loads_no_heavy_library() -> None:
    heavy = ("torch", "transformers", "gguf", "numpy")
    code = f"import sys, trtllm_tree.demo; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
