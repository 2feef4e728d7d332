"""Engines and servers of the installed TensorRT-LLM for these tests: jobs, their results, and when tokens may differ.

The models come from TLLM_TREE_TEST_MODEL and TLLM_TREE_TEST_HEAD (Hugging Face directories); without them it is the
demo's pair, which is written to the demo's cache. TLLM_TREE_TEST_MTP_MODEL is a GLM-4-MoE or Nemotron-H with an MTP
layer; the demo has none. TLLM_TREE_TEST_TIMEOUT is the seconds that an engine or a server has, 1800 unless set.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.demo.prompts import PROMPTS
from trtllm_tree.demo import resolve_head, resolve_target
from trtllm_tree.support.head import aux_layer_ids

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 64
TREE = (4, 5, 20)
TIMEOUT = float(os.environ.get("TLLM_TREE_TEST_TIMEOUT", "1800"))
# Two runs in bfloat16 may part where both tokens lie this close to the top, in standard deviations of what bfloat16
# does to a logit there. Of the difference of two logits in two runs it is three.
MAX_SPREADS = 6.0
GREEDY: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Pair:
    """A target and its EAGLE3 head."""

    model: str
    head: str

    @property
    def speculation(self) -> dict[str, Any]:
        """Fields of SpeculativeConfig that say which layers' outputs the head reads."""
        head, target = (
            json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            for folder in (self.head, self.model)
        )
        inputs = aux_layer_ids(head, target["num_hidden_layers"])
        return {"host_options": {"eagle3_layers_to_capture": [layer - 1 for layer in inputs]}}


def test_pair() -> Pair:
    """The pair of these tests."""
    model = os.environ.get("TLLM_TREE_TEST_MODEL") or str(resolve_target("demo"))
    head = os.environ.get("TLLM_TREE_TEST_HEAD") or str(resolve_head("demo"))
    return Pair(model, head)


test_pair.__test__ = False  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Job:
    """One engine and what it generates; the fields of `engine_run`.

    Attributes:
        kind: plain, chain, tree, mtp (a tree without a head) or drafter.
        sizes: K, S, N.
        speculation: further fields of SpeculativeConfig.
        options: further arguments of tensorrt_llm.LLM.
        one_by_one: one request at a time.
        rounds: how often all prompts are generated for.
        environment: variables of the process.
    """

    model: str
    head: str
    kind: str
    prompts: Sequence[Sequence[int]]
    sizes: tuple[int, int, int] = TREE
    speculation: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    kv_cache: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=lambda: GREEDY)
    one_by_one: bool = False
    rounds: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What came out: per round and prompt the facts of `engine_run.facts_of`, and all that the processes printed."""

    rounds: list[list[dict[str, Any]]]
    log: str

    @property
    def token_ids(self) -> list[list[int]]:
        """Of the last round."""
        return [facts["token_ids"] for facts in self.rounds[-1]]

    def assert_fewer_steps(self) -> None:
        """Drafts were accepted, as far as this version says how many."""
        known = [f["tokens_per_step"] for f in self.rounds[-1] if f["tokens_per_step"] is not None]
        print("tokens a step:", known)
        assert not known or sum(known) > 1.2 * len(known), "hardly a draft was accepted"


def run(job: Job) -> Result:
    """The result of a job; of equal jobs it is computed once.

    Raises:
        EngineFailedError: the engine did not start, or died.
    """
    return _run(json.dumps(asdict(job), sort_keys=True))


@cache
def _run(text: str) -> Result:
    job = json.loads(text)
    with tempfile.TemporaryDirectory() as folder:
        job_path, result_path = Path(folder) / "job.json", Path(folder) / "result.json"
        job_path.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "tests.tensorrt_llm.engine_run", str(job_path), str(result_path)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment_of(job["kind"] in ("tree", "mtp")) | job["environment"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
        if done.returncode or not result_path.exists():
            raise EngineFailedError(job["kind"], done.returncode, done.stdout)
        return Result(json.loads(result_path.read_text(encoding="utf-8")), done.stdout)


def environment_of(trees: bool) -> dict[str, str]:
    """This process's environment; with trees on, what configs/tree_eagle.yaml puts into env_overrides."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("TLLM_TREE_ENABLE")}
    return found | ({"TLLM_TREE_ENABLE": "1", "TLLM_FMHA_LIBS": "+trtllm_tree"} if trees else {})


class EngineFailedError(Exception):
    """An engine or a server ended before its time; the message is its log."""

    def __init__(self, what: str, code: int, log: str) -> None:
        super().__init__(f"{what} ended with {code}:\n{log[-20000:]}")
        self.log = log


def chat_prompts(model: str, count: int) -> list[list[int]]:
    """Token ids of `count` prompts of different kinds and lengths."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    found = []
    for text in PROMPTS[:count]:
        if tokenizer.chat_template is None:
            found.append(tokenizer(text)["input_ids"])
            continue
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        found.append(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    return found


class NearTie:
    """Whether two greedy runs may part at a token, by the logits of the same weights in float32 and in bfloat16.

    Args:
        model: the target's directory.
        max_spreads: how far either token may lie below the top; see `MAX_SPREADS`.
    """

    def __init__(self, model: str, max_spreads: float = MAX_SPREADS) -> None:
        self._dir, self._max_spreads = model, max_spreads
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def _models(self) -> tuple[Any, Any]:
        """Loaded when tokens differ for the first time."""
        load = AutoModelForCausalLM.from_pretrained
        models: list[Any] = [load(self._dir, dtype=torch.bfloat16, local_files_only=True) for _ in range(2)]
        rough, exact = models
        return rough.to(self._device), exact.to(self._device).float()

    @torch.inference_mode()
    def gap(self, prompt_ids: Sequence[int], want: Sequence[int], got: Sequence[int]) -> float:
        """How far below the top the worse token lies where the runs part, in standard deviations of the rounding."""
        at = next(index for index, (a, b) in enumerate(zip(want, got, strict=False)) if a != b)
        ids = torch.tensor([[*prompt_ids, *want[:at]]], device=self._device)
        rough, exact = (model(ids).logits[0, -1].float() for model in self._models)
        spread = (rough - exact).std().item()
        gap = exact.max().item() - min(exact[want[at]].item(), exact[got[at]].item())
        print(
            f"token {at}: {want[at]} or {got[at]}, {gap:.4f} below the top; rounding moves logits by {spread:.4f}"
        )
        return gap / spread

    def assert_same(self, want: Result, got: Result) -> None:
        """All tokens agree, up to near-ties, in every round."""
        for want_round, got_round in zip(want.rounds, got.rounds, strict=True):
            for a, b in zip(want_round, got_round, strict=True):
                assert a["prompt_ids"] == b["prompt_ids"]
                if a["token_ids"] == b["token_ids"]:
                    assert (a["text"], a["finish_reason"]) == (b["text"], b["finish_reason"])
                    continue
                assert len(a["token_ids"]) == len(b["token_ids"]), "one of them ended early"
                gap = self.gap(a["prompt_ids"], a["token_ids"], b["token_ids"])
                assert gap <= self._max_spreads, "a divergence that rounding does not explain"


@dataclass(frozen=True)
class RankLine:
    """What a rank says of itself: the line of `plugin.log_line`."""

    rank: int
    worker: str
    libraries: list[str]
    verify: str
    version: str


def rank_lines(log: str) -> list[RankLine]:
    """The lines of all ranks in a log, in order of ranks."""
    pattern = r"\[trtllm_tree\] rank (\d+): worker (\w+), attention ([\w >]+), verify (\w+), TensorRT-LLM (\S+): \d+"
    found = [
        RankLine(int(rank), worker, libraries.split(" > "), verify, version)
        for rank, worker, libraries, verify, version in re.findall(pattern, log)
    ]
    return sorted(found, key=lambda line: line.rank)


@dataclass(frozen=True)
class Server:
    """A running server."""

    address: str
    model: str
    log_path: Path

    @property
    def log(self) -> str:
        """All that it printed so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def complete(self, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        """The first choice of a completion."""
        body = {"model": self.model, "prompt": list(prompt), "temperature": 0.0, "max_tokens": MAX_TOKENS}
        request = urllib.request.Request(
            f"{self.address}/v1/completions",
            data=json.dumps(body | options).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return json.load(answer)["choices"][0]


@contextlib.contextmanager
def serving(
    command: Sequence[str], model: str, log_path: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a server with `--port` appended, wait until it is healthy, and stop it in the end.

    Raises:
        EngineFailedError: it ended before, or was not healthy in time.
    """
    port = _free_port()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=ROOT,
            env=environment_of(False) | dict(environment or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://localhost:{port}", model, log_path)
    try:
        _wait_until_healthy(server, process)
        yield server
    finally:
        _stop(process)


def _wait_until_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineFailedError("the server", process.returncode, server.log)
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{server.address}/health", timeout=5).close()
            return
        time.sleep(1)
    raise EngineFailedError("the server, never healthy,", -1, server.log)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the ranks that it started: they are one session."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
            if number == signal.SIGKILL:
                return


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]
