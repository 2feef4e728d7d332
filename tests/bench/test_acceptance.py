"""What the acceptance benchmark refuses, and what it says of requests that fail."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from trtllm_tree.bench.acceptance import measure, read_prompts
from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.load import RunConfig
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.errors import ConfigError


def prompt_file(folder: Path, *prompts: str) -> Path:
    path = folder / "some.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in prompts))
    return path


@pytest.fixture
def config(tiny_target: Path, tiny_head: Path) -> RunConfig:
    spec = SpeculativeConfig(tree_topk=3, num_steps=3, num_nodes=12, speculative_model=str(tiny_head))
    engine = EngineConfig(model=str(tiny_target), dtype="float32", max_seq_len=256)
    return RunConfig(engine=engine, speculative=spec)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"", ["some.jsonl"]),
        (b"\xff\xfe{}", ["some.jsonl"]),
        (b'{"turns": "hello"}\n{"turns": ["fine"]}\n{"turns": [3]}\n', ["some.jsonl:1", "some.jsonl:3"]),
        (b'{"turns": []}\nnothing\n[1]\n', ["some.jsonl:1", "some.jsonl:2", "some.jsonl:3"]),
        (b'{"turns": [""]}\n', ["some.jsonl:1"]),
    ],
)
def test_bad_prompt_files_are_named_with_every_bad_line(
    tmp_path: Path, content: bytes, names: list[str]
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    named = [problem.option if ":" in problem.option else problem.value for problem in caught.value.problems]
    assert [str(name).rpartition("/")[2] for name in named] == names


@pytest.mark.parametrize("max_tokens", [-1, 0, 1])
def test_too_few_tokens_to_verify_a_draft_are_refused(
    config: RunConfig, tmp_path: Path, max_tokens: int
) -> None:
    with pytest.raises(ConfigError, match=f"max_tokens = {max_tokens}: must be at least 2"):
        measure(config, [prompt_file(tmp_path, "a")], max_tokens=max_tokens)


def test_a_request_that_fails_is_named_and_counted_apart(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = measure(config, [prompt_file(tmp_path, "a", "bc")], max_tokens=6)
    with caplog.at_level(logging.WARNING):
        rows = measure(config, [prompt_file(tmp_path, "a", "x" * 300, "bc")], max_tokens=6)
    assert [(row.mode, row.num_prompts, row.num_failed) for row in rows] == [("chain", 2, 1), ("tree", 2, 1)]
    figures = [(row.num_tokens, row.target_forwards) for row in rows]
    assert figures == [(row.num_tokens, row.target_forwards) for row in whole]
    said = [record.getMessage() for record in caplog.records if "some.jsonl:2" in record.getMessage()]
    assert [mode in text for mode, text in zip(("(chain)", "(tree)"), said, strict=True)] == [True, True]


def test_a_file_of_which_nothing_is_served_is_an_error_with_the_reason(
    config: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"some.jsonl.*none of its 2 prompts.*line 1: .*9000"):
        measure(config, [prompt_file(tmp_path, "a", "b")], max_tokens=9000)
