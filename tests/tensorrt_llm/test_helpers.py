"""What the tests on a real TensorRT-LLM are made of, without one: these run everywhere."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.doubles.tensorrt_llm import LAYOUTS, double_entries
from tests.doubles.tensorrt_llm.install import write_runtime
from tests.hosts.tensorrt_llm.conftest import Install, double_root, install_double
from tests.tensorrt_llm import engines
from tests.tensorrt_llm.contract import closest_layout, differences
from tests.tensorrt_llm.engines import (
    GREEDY,
    EngineFailedError,
    Job,
    NearTie,
    Pair,
    RankLine,
    Result,
    chat_prompts,
    environment_of,
    rank_lines,
    serving,
)
from trtllm_tree.hosts.tensorrt_llm.probe import Resolved, probe

__all__ = ["double_root", "install_double"]  # fixtures


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_double_is_what_its_facts_say(install_double: Install, layout: str) -> None:
    install_double(double_entries(layout), layout)
    assert closest_layout() == (layout, [])


def test_a_package_that_differs_from_the_double_is_told_where(install_double: Install) -> None:
    entries = double_entries("new")
    install_double([entry for entry in entries if entry["name"] != "FMHA_LIBS"], "new")
    changed = {entry["name"]: entry for entry in entries}
    changed["Drafter"]["methods"]["prepare_draft_tokens"][1:2] = ["batch"]
    changed["Drafter"]["methods"]["__init__"].append("needed")
    changed["KVCacheManager"]["methods"]["get_buffers"][2] = "kv_layout"
    changed["TorchLlmArgs"]["fields"].append("colour")
    found = differences(entries)
    expected = (
        ("TorchLlmArgs.colour", "is missing"),
        ("Drafter.__init__", "parameter needed is missing"),
        ("Drafter.prepare_draft_tokens", "parameter batch is missing"),
        ("Drafter.prepare_draft_tokens", "parameter scheduled_requests is new"),
        ("FMHA_LIBS", "is missing"),
        ("KVCacheManager.get_buffers", "parameter kv_layout has a default"),
    )
    assert len(found) == len(expected), found
    for line, (name, rule) in zip(found, expected, strict=True):
        assert line.endswith(f"{name}: {rule}")


def test_the_line_of_a_rank_is_read_back(install_double: Install, capfd: pytest.CaptureFixture[str]) -> None:
    from trtllm_tree.hosts.tensorrt_llm.plugin import log_line

    install_double(double_entries("new"), "new")
    report = probe()
    symbol = report.resolved["fmha", "get_enabled_fmha_lib_classes"]
    libraries = [type("TreeCascadeFmha", (), {}), type("FallbackFmha", (), {})]
    report.resolved["fmha", "get_enabled_fmha_lib_classes"] = Resolved(  # type: ignore[index]
        symbol.symbol, lambda: libraries, symbol.path, symbol.parameters
    )
    worker = type("TreeEagleWorker", (), {})
    for rank in (1, 0):
        log_line(rank=rank, worker=worker, verify="gumbel", report=report)
    expected = [
        RankLine(rank, "TreeEagleWorker", ["TreeCascadeFmha", "FallbackFmha"], "gumbel", "1.4.0rc1")
        for rank in (0, 1)
    ]
    assert rank_lines(capfd.readouterr().err) == expected


def test_only_trees_get_the_plugins_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_TREE_ENABLE", "1")
    assert environment_of(True)["TLLM_TREE_ENABLE"] == "1"
    assert environment_of(True)["TLLM_FMHA_LIBS"] == "+trtllm_tree"
    assert "TLLM_TREE_ENABLE" not in environment_of(False)


def test_an_engine_that_dies_is_told_with_its_log(tiny_target: Path) -> None:
    # Without TensorRT-LLM it dies at its import; with one, at this option.
    job = Job(str(tiny_target), "", "plain", [[1, 2]], options={"no_such_option": 1})
    with pytest.raises(EngineFailedError, match=r"no_such_option|tensorrt_llm"):
        engines.run(job)


def test_jobs_run_over_the_double(tiny_target: Path, tiny_head: Path, tmp_path: Path) -> None:
    """In processes of their own, with the start-up hook, as they do over the real package."""
    write_runtime(tmp_path / "double", "new")
    hook = "import trtllm_tree_startup; trtllm_tree_startup.install()"
    (tmp_path / "double" / "sitecustomize.py").write_text(hook, encoding="utf-8")
    path = [str(folder) for folder in (tmp_path / "double", engines.ROOT, engines.ROOT / "plugins")]
    environment = {"PYTHONPATH": os.pathsep.join(path)}
    pair = Pair(str(tiny_target), str(tiny_head))

    def result(kind: str, **changes: Any) -> Result:
        options = {"max_batch_size": 2, "max_seq_len": 256, "dtype": "float32"}
        cache = {"enable_block_reuse": False}
        job = Job(
            pair.model,
            pair.head,
            kind,
            [[5, 6, 7], [9] * 20, [4]],
            (3, 3, 8),
            pair.speculation,
            options,
            cache,
        )
        return engines.run(
            replace(job, sampling=GREEDY | {"max_tokens": 12}, environment=environment, **changes)
        )

    plain, tree = result("plain"), result("tree", rounds=2, one_by_one=True)
    assert plain.token_ids == tree.token_ids == [facts["token_ids"] for facts in tree.rounds[0]]
    assert all(len(tokens) == 12 for tokens in plain.token_ids)
    assert rank_lines(plain.log) == []
    (line,) = rank_lines(tree.log)
    assert line.worker == "TreeEagleWorker" and line.libraries[0] == "TreeCascadeFmha"


def test_prompts_are_the_chats_of_the_model(tiny_target: Path, tiny_tokenizer: Any) -> None:
    prompts = chat_prompts(str(tiny_target), 3)
    assert len({len(prompt) for prompt in prompts}) == 3
    text = tiny_tokenizer.decode(prompts[0])
    assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_start|>assistant\n")


def _result(prompt: list[int], tokens: list[int]) -> Result:
    facts = {"prompt_ids": prompt, "token_ids": tokens, "text": str(tokens), "finish_reason": "length"}
    return Result([[facts | {"tokens_per_step": None}]], "")


def test_runs_may_part_at_a_near_tie_and_nowhere_else(tiny_target: Path) -> None:
    prompt = [5, 6, 7, 8]
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.bfloat16).float()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    order = logits.argsort(descending=True).tolist()
    best, worst = order[0], order[-1]
    near_tie, want = NearTie(str(tiny_target)), _result(prompt, [best, 3])
    near_tie.assert_same(want, want)
    with pytest.raises(AssertionError, match="rounding"):
        near_tie.assert_same(want, _result(prompt, [worst, 3]))
    with pytest.raises(AssertionError, match="early"):
        near_tie.assert_same(want, _result(prompt, [best]))
    gap = near_tie.gap(prompt, [best], [order[1]])
    assert gap > 0
    NearTie(str(tiny_target), 1.01 * gap).assert_same(want, _result(prompt, [order[1], 3]))
    with pytest.raises(AssertionError, match="rounding"):
        NearTie(str(tiny_target), 0.99 * gap).assert_same(want, _result(prompt, [order[1], 3]))


SERVER = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"choices": [{"text": f"{asked['model']} {asked['prompt']}", "finish_reason": "stop"}]})

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

print("a line of the log", flush=True)
if "die" in sys.argv:
    sys.exit("unknown library trtllm_tree")
http.server.HTTPServer(("localhost", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_asked_and_stopped(tmp_path: Path) -> None:
    with serving([sys.executable, "-c", SERVER], "m", tmp_path / "log") as server:
        assert server.complete([1, 2])["text"] == "m [1, 2]"
        assert "a line of the log" in server.log
    with pytest.raises(OSError):
        server.complete([1, 2])


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineFailedError, match="unknown library trtllm_tree"),
        serving([sys.executable, "-c", SERVER, "die"], "m", tmp_path / "log"),
    ):
        pass
