"""`trtllm-serve MODEL --extra_llm_api_options YAML`, as a user starts it, on the installed TensorRT-LLM."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tensorrt_llm.engines import ROOT, EngineFailedError, Pair, Server, rank_lines, serving

pytestmark = [pytest.mark.tensorrt_llm, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
LIMITS = {"max_batch_size": 4, "max_seq_len": 1024, "kv_cache_config": {"free_gpu_memory_fraction": 0.3}}
Write = Callable[..., str]


@pytest.fixture(scope="module")
def write_config(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """`write_config(**keys)`: configs/tree_eagle.yaml with this pair's head and small limits, as a file."""

    def write(**keys: Any) -> str:
        options = yaml.safe_load((ROOT / "configs" / "tree_eagle.yaml").read_text(encoding="utf-8"))
        options["speculative_config"]["speculative_model"] = pair.head
        path = tmp_path_factory.mktemp("serve") / "tree.yaml"
        path.write_text(yaml.safe_dump(options | LIMITS | keys), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="module")
def plain_texts(
    pair: Pair, prompts: list[list[int]], write_config: Write, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """What a server without speculation answers."""
    config = write_config(speculative_config=None, env_overrides={})
    log = tmp_path_factory.mktemp("plain") / "log"
    with serving(["trtllm-serve", pair.model, "--extra_llm_api_options", config], pair.model, log) as server:
        assert rank_lines(server.log) == []
        return [server.complete(prompt)["text"] for prompt in prompts]


@pytest.fixture(scope="module")
def tree_server(
    pair: Pair, write_config: Write, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    command = ["trtllm-serve", pair.model, "--extra_llm_api_options", write_config()]
    with serving(command, pair.model, tmp_path_factory.mktemp("tree") / "log") as server:
        yield server


def test_the_users_command_is_enough(tree_server: Server) -> None:
    (line,) = rank_lines(tree_server.log)
    assert (line.worker, line.libraries[0]) == ("TreeEagleWorker", "TreeCascadeFmha")


def test_answers_are_those_without_speculation(
    tree_server: Server, prompts: list[list[int]], plain_texts: list[str]
) -> None:
    answers = [tree_server.complete(prompt)["text"] for prompt in prompts]
    same = sum(a == b for a, b in zip(answers, plain_texts, strict=True))
    print(f"{same} of {len(prompts)} answers are the same")
    # Rounding may part some; test_lossless looks at where and why. Nonsense would part all at once.
    assert same >= len(prompts) // 2
    for answer, text in zip(answers, plain_texts, strict=True):
        assert answer[:16] == text[:16]


def test_many_requests_at_once_are_all_answered(tree_server: Server, prompts: list[list[int]]) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(tree_server.complete, prompts))
    assert all(answer["finish_reason"] in ("stop", "length") and answer["text"] for answer in answers)


def test_without_the_plugin_trees_do_not_start(pair: Pair, write_config: Write, tmp_path: Path) -> None:
    command = ["trtllm-serve", pair.model, "--extra_llm_api_options", write_config()]
    with (
        pytest.raises(EngineFailedError) as caught,
        serving(command, pair.model, tmp_path / "log", {"TLLM_TREE_DISABLE": "1"}),
    ):
        pass
    assert "trtllm_tree" in caught.value.log


def test_refusals_come_together_before_anything_is_served(
    pair: Pair, write_config: Write, tmp_path: Path
) -> None:
    sizes = {
        "max_draft_len": 6,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": 12,
    }
    section = {"decoding_type": "Eagle3", "speculative_model": pair.head} | sizes
    config = write_config(enable_attention_dp=True, speculative_config=section)
    command = ["trtllm-serve", pair.model, "--extra_llm_api_options", config]
    with pytest.raises(EngineFailedError) as caught, serving(command, pair.model, tmp_path / "log"):
        pass
    for option in ("enable_attention_dp = True", "max_total_draft_tokens = 12"):
        assert option in caught.value.log


@pytest.mark.parametrize("form", ["custom_module_dirs", "trtllm-tree serve"])
def test_the_explicit_ways_start_the_same(
    pair: Pair, write_config: Write, prompts: list[list[int]], tree_server: Server, tmp_path: Path, form: str
) -> None:
    config = write_config()
    if form == "custom_module_dirs":
        plugin = str(ROOT / "plugins" / "trtllm_tree_plugin")
        command = [
            "trtllm-serve",
            pair.model,
            "--custom_module_dirs",
            plugin,
            "--extra_llm_api_options",
            config,
        ]
    else:
        found = shutil.which("trtllm-tree")
        assert found, "trtllm-tree is not installed beside this Python"
        command = [found, "serve", "--host", "tensorrt_llm", "--config", config, pair.model]
    with serving(command, pair.model, tmp_path / "log") as server:
        (line,) = rank_lines(server.log)
        assert line.worker == "TreeEagleWorker"
        assert server.complete(prompts[0])["text"] == tree_server.complete(prompts[0])["text"]
