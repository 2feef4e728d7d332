"""The trace page: its data re-tell the run, its markup is sound, and nothing in a token can break it.

`KnownContinuation` stands in for the random head's scorer, so that paths are long and leave the first branch.
How the page looks is checked by eye.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.oracles.known_continuation import KnownContinuation
from trtllm_tree import LLM, SamplingParams
from trtllm_tree.cli.main import main
from trtllm_tree.config.load import RunConfig
from trtllm_tree.draft.eagle import Candidates
from trtllm_tree.engine.engine import Engine
from trtllm_tree.sampling.base import Accepted
from trtllm_tree.trace import TracedRound, TraceRecorder, render_html

PROMPT = 'Say "</script>"'
VOID = {"meta", "input", "link", "br", "hr", "img"}
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><!--",
    "\"'",
    "&lt;",
    "{{title}}{{data}}",
    "\n\u2028\x00",
    "\\u003c",
]


class Page(HTMLParser):
    """A page taken apart; fails on a tag that is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("id") or tag))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            name = self._open[-1][1]
            self.texts[name] = self.texts.get(name, "") + data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.texts["data"])


@pytest.fixture
def trace(
    tmp_path: Path, tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Page, Engine]]:
    """Runs the command on the tiny models, with a drafter that often knows the answer."""
    with LLM(str(tiny_target), max_seq_len=512) as plain:
        prompt = plain.encode(PROMPT)
        truth = plain.generate(prompt, SamplingParams(max_tokens=80, ignore_eos=True)).outputs[0].token_ids
    engines: list[Engine] = []
    from_config = LLM.from_config

    def build(config: RunConfig) -> LLM:
        llm = from_config(config)
        KnownContinuation(llm, {tuple(prompt): truth}, monkeypatch)
        engines.append(llm.engine)
        return llm

    monkeypatch.setattr(LLM, "from_config", build)

    def run(*argv: str) -> tuple[Page, Engine]:
        path = tmp_path / "page.html"
        models = ("--model", str(tiny_target), "--speculative-model", str(tiny_head))
        assert main(["trace", "--html", str(path), *models, "--prompt", PROMPT, "--raw", *argv]) == 0
        return Page(path.read_text(encoding="utf-8")), engines[-1]

    return run


def plain_ids(target: Path, max_tokens: int) -> list[int]:
    with LLM(str(target), max_seq_len=512) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=max_tokens)).outputs[0].token_ids


def told_ids(rounds: list[dict[str, Any]]) -> list[int]:
    """The output as the page tells it: the first root, then what every round gave."""
    return [rounds[0]["tokens"][0], *(token for each in rounds for token in each["kept"][: each["output"]])]


def assert_rounds_hang_together(rounds: list[dict[str, Any]]) -> None:
    for each, after in zip(rounds, [*rounds[1:], None], strict=True):
        path, kept = each["path"], each["kept"]
        assert path[0] == 0 and each["parents"][0] == -1
        assert [each["parents"][node] for node in path[1:]] == path[:-1]
        assert len(kept) == len(path) and [each["tokens"][node] for node in path[1:]] == kept[:-1]
        assert after is None or (after["tokens"][0] == kept[-1] and each["output"] == len(kept))


def test_the_rounds_retell_the_run_of_a_tree(
    trace: Callable[..., tuple[Page, Engine]],
    tiny_target: Path,
    tiny_tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, engine = trace("--max-tokens", "40")
    data, rounds = page.data, page.data["rounds"]
    assert_rounds_hang_together(rounds)
    assert told_ids(rounds) == plain_ids(tiny_target, 40)
    assert len(rounds) == engine.target_forwards
    assert max(len(each["path"]) for each in rounds) > 3
    assert any(each["path"] != list(range(len(each["path"]))) for each in rounds), (
        "no path left the first branch"
    )
    for each in rounds:
        assert len(each["tokens"]) == 32 and each["scores"][0] == 0
        assert all(
            each["scores"][node] <= each["scores"][parent]
            for node, parent in enumerate(each["parents"])
            if node
        )
    shown = {token for each in rounds for token in (*each["tokens"], *each["kept"])}
    assert data["texts"] == {str(token): tiny_tokenizer.decode([token]) for token in shown}
    per_forward = f"{39 / len(rounds):.2f}"
    summary = dict(data["summary"])
    assert list(summary.values()) == [per_forward, "40", str(len(rounds)), "4", "5", "32"]
    assert data["prompt"] == PROMPT
    assert f"{len(rounds)} rounds, {per_forward} tokens" in capsys.readouterr().out


def test_the_rounds_retell_the_run_of_a_chain(
    trace: Callable[..., tuple[Page, Engine]], tiny_target: Path, tmp_path: Path
) -> None:
    config = tmp_path / "chain.yaml"
    section = {"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": "set by the command line"}
    config.write_text(yaml.safe_dump({"speculative_config": section}), encoding="utf-8")
    page, engine = trace("--max-tokens", "30", "--config", str(config))
    rounds = page.data["rounds"]
    assert_rounds_hang_together(rounds)
    assert told_ids(rounds) == plain_ids(tiny_target, 30)
    assert len(rounds) == engine.target_forwards
    assert max(len(each["path"]) for each in rounds) > 2
    assert all(each["parents"] == [-1, 0, 1, 2, 3] and each["scores"] is None for each in rounds)


def test_tokens_behind_the_end_of_the_output_are_told_apart(
    trace: Callable[..., tuple[Page, Engine]], tiny_target: Path
) -> None:
    rounds = trace("--max-tokens", "40")[0].data["rounds"]
    chosen = next(index for index, each in enumerate(rounds) if index and len(each["kept"]) > 2)
    max_tokens = len(told_ids(rounds[:chosen])) + 1
    cut = trace("--max-tokens", str(max_tokens))[0].data["rounds"]
    assert len(cut) == chosen + 1
    assert cut[-1]["output"] == 1 and cut[-1]["kept"] == rounds[chosen]["kept"]
    assert told_ids(cut) == plain_ids(tiny_target, max_tokens)


def test_an_answer_of_one_token_has_no_round(trace: Callable[..., tuple[Page, Engine]]) -> None:
    data = trace("--max-tokens", "1")[0].data
    assert data["rounds"] == [] and data["texts"] == {}


def test_the_page_needs_nothing_else(trace: Callable[..., tuple[Page, Engine]]) -> None:
    page, _ = trace("--max-tokens", "4")
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert attributes.isdisjoint({"src", "href", "srcset", "action"})
    assert not any(mark in page.texts["style"] for mark in ("url(", "@import"))
    assert "fetch(" not in page.texts["script"] and "import" not in page.texts["script"]
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) and {"bars", "slider", "text", "tree", "data"} <= set(ids)


def a_round(**changed: Any) -> TracedRound:
    values: dict[str, Any] = {"slot": 0, "tokens": [0, 1, 2, 3], "parents": [-1, 0, 1, 0], "scores": None}
    return TracedRound(**(values | {"path": [0, 3], "kept": [3, 4], "num_output": 2} | changed))


def test_hostile_texts_stay_data() -> None:
    def render(texts: list[str], label: str) -> Page:
        rounds = [a_round(tokens=[0, 1, 2, 3], kept=[3, 4]), a_round(tokens=[4, 5, 6, 0], kept=[0, 1])]
        return Page(render_html(rounds, texts.__getitem__, title=label, summary={label: label}, prompt=label))

    benign = render(["a"] * len(HOSTILE), "b")
    for label in HOSTILE:
        hostile = render(HOSTILE, label)
        assert hostile.tags == benign.tags
        assert hostile.texts["script"] == benign.texts["script"]
        # The parser of the test, unlike a browser, keeps a NUL in text.
        assert hostile.texts["title"] == hostile.texts["h1"] == label
        data = hostile.data
        assert data["texts"] == {str(token): text for token, text in enumerate(HOSTILE)}
        assert data["prompt"] == label and data["summary"] == [[label, label]]


def test_what_is_not_a_number_is_null_and_no_token() -> None:
    scores = [0.0, -math.inf, math.nan, -0.5]
    page = Page(render_html([a_round(scores=scores, kept=[3, -1])], str, title="t", summary={}))
    assert page.data["rounds"][0]["scores"] == [0.0, None, None, -0.5]
    assert page.data["rounds"][0]["kept"] == [3, -1] and "-1" not in page.data["texts"]


def test_the_recorder_copies_and_pairs_by_slot() -> None:
    def ints(*rows: Any) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32)

    recorder = TraceRecorder()
    tokens, parents = ints([10, 11, 12], [20, 21, 22]), ints([-1, 0, 0], [-1, 0, 1])
    scores = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]])
    recorder.on_drafted(torch.tensor([5, 7]), Candidates(tokens, parents, scores))
    for buffer in (tokens, parents, scores):
        buffer.fill_(99)
    accepted = Accepted(
        predict=ints([21, 8, -1], [12, 9, -1]), accept_len=ints(2, 2), path=ints([0, 1, -1], [0, 2, -1])
    )
    recorder.on_verified(torch.tensor([7, 5]), accepted)
    recorder.on_drafted(torch.tensor([7]), Candidates(ints([8, 1, 2])))
    recorder.on_verified(torch.tensor([7]), Accepted(ints([1, 3, -1]), ints(2), path=None))
    assert recorder.rounds == [
        TracedRound(7, [20, 21, 22], [-1, 0, 1], [0.0, -3.0, -4.0], [0, 1], [21, 8], 2),
        TracedRound(5, [10, 11, 12], [-1, 0, 0], [0.0, -1.0, -2.0], [0, 2], [12, 9], 2),
        TracedRound(7, [8, 1, 2], [-1, 0, 1], None, [0, 1], [1, 3], 2),
    ]


@pytest.mark.parametrize(
    ("name", "max_tokens", "option"),
    [("missing/page.html", "8", "--html"), (".", "8", "--html"), ("page.html", "0", "max_tokens")],
)
def test_what_cannot_be_written_or_served_is_reported_before_the_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    max_tokens: str,
    option: str,
) -> None:
    def load(config: RunConfig) -> LLM:
        raise AssertionError("loaded")

    monkeypatch.setattr(LLM, "from_config", load)
    assert main(["trace", "--html", str(tmp_path / name), "--max-tokens", max_tokens]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{option} = ") and captured.out == ""


def test_a_config_without_speculation_has_nothing_to_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "plain.yaml"
    config.write_text("model: demo\n", encoding="utf-8")
    assert main(["trace", "--html", str(tmp_path / "page.html"), "--config", str(config)]) == 1
    assert capsys.readouterr().err.startswith("speculative_config = None")
    assert not (tmp_path / "page.html").exists()
