"""`generate` and `bench acceptance` from the command line, on tiny models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trtllm_tree import LLM, SamplingParams
from trtllm_tree.cli import generate
from trtllm_tree.cli.main import main
from trtllm_tree.config import RunConfig

PROMPT = "tell me"


@pytest.fixture
def config(tmp_path: Path, tiny_target: Path, tiny_head: Path) -> str:
    """A config file for the tiny models: K=3, S=3, N=12."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"model: {tiny_target}\ndtype: float32\nmax_seq_len: 256\n"
        f"speculative_config: {{decoding_type: Eagle3, speculative_model: {tiny_head}, max_draft_len: 3,"
        " use_dynamic_tree: true, dynamic_tree_max_topK: 3, max_total_draft_tokens: 11}\n"
    )
    return str(path)


def _last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def _plain_ids(target: Path, max_tokens: int) -> list[int]:
    with LLM(str(target), dtype="float32", max_seq_len=256) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=max_tokens)).outputs[0].token_ids


def test_compare_reports_the_three_runs_on_the_last_line(
    config: str, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--config", config, "--prompt", PROMPT, "--raw", "--max-tokens", "20"]
    assert main([*argv, "--compare", "--json"]) == 0
    report = _last_json(capsys)
    assert set(report) == {"plain", "chain", "tree", "identical"} and report["identical"] is True
    want = _plain_ids(tiny_target, 20)
    for name in ("plain", "chain", "tree"):
        run = report[name]
        assert set(run) == {"token_ids", "target_forwards", "tokens_per_forward", "seconds"}
        assert run["token_ids"] == want
        decoded = len(want) - 1  # the first token is prefill's
        assert run["tokens_per_forward"] == pytest.approx(decoded / run["target_forwards"])
    assert report["plain"]["target_forwards"] == len(want) - 1
    assert report["tree"]["target_forwards"] <= report["plain"]["target_forwards"]


def test_one_run_prints_its_text_and_its_ids(
    config: str, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--config", config, "--prompt", PROMPT, "--raw", "--max-tokens", "9", "--json"]
    assert main(argv) == 0
    report = _last_json(capsys)
    assert report["token_ids"] == _plain_ids(tiny_target, 9)
    assert isinstance(report["text"], str)


def test_sampled_runs_of_a_comparison_share_the_seed_that_is_printed(
    config: str, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--config", config, "--prompt", PROMPT, "--raw", "--max-tokens", "12", "--json"]
    argv += ["--temperature", "1.2", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01"]
    assert main([*argv, "--compare"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.strip().splitlines()[-1])
    seed = printed.err.split("seed ")[1].split()[0]
    assert report["identical"] is True
    assert main([*argv, "--seed", seed]) == 0
    again = _last_json(capsys)["token_ids"]
    assert again == report["plain"]["token_ids"] != _plain_ids(tiny_target, 12)


def test_a_comparison_edits_logits_as_the_options_say(
    config: str, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "generate",
        "--config",
        config,
        "--prompt",
        PROMPT,
        "--raw",
        "--max-tokens",
        "12",
        "--compare",
        "--json",
    ]
    argv += ["--repetition-penalty", "1.5", "--frequency-penalty", "0.4", "--presence-penalty", "0.3"]
    argv += ["--logit-bias", "40=3.5", "--logit-bias", "41=-2", "--min-tokens", "9", "--bad-word", "ab"]
    assert main(argv) == 0
    report = _last_json(capsys)
    params = SamplingParams(
        max_tokens=12,
        repetition_penalty=1.5,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={40: 3.5, 41: -2.0},
        min_tokens=9,
        bad_words=["ab"],
    )
    with LLM(str(tiny_target), dtype="float32", max_seq_len=256) as llm:
        want = llm.generate(PROMPT, params).outputs[0].token_ids
    assert report["identical"] is True and report["tree"]["token_ids"] == want != _plain_ids(tiny_target, 12)
    with pytest.raises(SystemExit):
        main([*argv, "--logit-bias", "40"])
    assert "'40' is not ID=BIAS" in capsys.readouterr().err


def test_a_comparison_follows_a_grammar(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xgrammar")
    schema, grammar = tmp_path / "schema.json", tmp_path / "g.ebnf"
    schema.write_text('{"type": "integer", "minimum": 1, "maximum": 9}')
    grammar.write_text('root ::= "<" [a-c] ">"')
    argv = ["generate", "--config", config, "--prompt", PROMPT, "--raw", "--max-tokens", "20", "--json"]
    for options, pattern in (
        (["--json-schema", str(schema)], "[1-9]"),
        (["--regex", "[a-f]{3}"], "[a-f]{3}"),
        (["--choice", "yes", "--choice", "no"], "yes|no"),
        (["--grammar", str(grammar)], "<[a-c]>"),
        (["--json-object"], r"[\[{].*"),
    ):
        assert main([*argv, *options]) == 0
        assert re.fullmatch(pattern, _last_json(capsys)["text"], re.DOTALL)
    assert main([*argv, "--compare", "--regex", "[a-f]{3}"]) == 0
    assert _last_json(capsys)["identical"] is True


def test_a_grammar_that_is_missing_or_wrong_is_an_error_line(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--config", config, "--prompt", PROMPT, "--raw"]
    assert main([*argv, "--json-schema", str(tmp_path / "none.json")]) == 1
    assert "--json-schema" in capsys.readouterr().err
    assert main([*argv, "--choice", ""]) == 1
    assert "guided_decoding.choice" in capsys.readouterr().err


def test_stops_and_log_probabilities_are_asked_for(
    config: str, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--config", config, "--prompt", PROMPT, "--raw", "--max-tokens", "20", "--json"]
    with LLM(str(tiny_target), dtype="float32", max_seq_len=256) as llm:
        free = llm.generate(PROMPT, SamplingParams(max_tokens=20, logprobs=2)).outputs[0]
    stop = free.text[8:10]
    assert main([*argv, "--stop", "never said", "--stop", stop, "--logprobs", "2"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.strip().splitlines()[-1])
    assert report["text"] == free.text[: free.text.index(stop)]
    assert report["token_ids"] == free.token_ids[: len(report["token_ids"])] != free.token_ids
    assert free.logprobs is not None
    for entry, expected in zip(report["logprobs"], free.logprobs, strict=False):
        assert {int(token): scored["rank"] for token, scored in entry.items()} == {
            token: scored.rank for token, scored in expected.items()
        }
        for token, scored in expected.items():
            assert entry[str(token)]["logprob"] == pytest.approx(scored.logprob, abs=1e-4)
    first = free.token_ids[0]
    assert f"{free.logprobs[0][first].logprob:.3f}" in printed.err


def test_the_end_token_is_ignored_where_the_command_line_says_so(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []

    class Noted(Exception):
        """Ends the command where the model would be loaded."""

    def noted(run: RunConfig, params: SamplingParams, args: Any, **options: Any) -> None:
        asked.append(params)
        raise Noted

    monkeypatch.setattr(generate, "_timed", noted)
    for options in ([], ["--ignore-eos"]):
        with pytest.raises(Noted):
            main(["generate", "--config", config, *options])
    assert [params.ignore_eos for params in asked] == [False, True]


def test_a_chain_is_compared_with_plain_decoding_alone(
    tmp_path: Path, tiny_target: Path, tiny_head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(
        f"model: {tiny_target}\ndtype: float32\nmax_seq_len: 256\n"
        f"speculative_config: {{decoding_type: Eagle3, speculative_model: {tiny_head}, max_draft_len: 3}}\n"
    )
    argv = ["generate", "--config", str(path), "--prompt", PROMPT, "--raw", "--max-tokens", "9"]
    assert main([*argv, "--compare", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.strip().splitlines()[-1])
    assert set(report) == {"plain", "chain", "identical"} and report["identical"] is True
    assert "outputs of plain and chain: identical" in printed.err and "tree" not in printed.err


@pytest.mark.parametrize(
    ("options", "option", "num_lines"),
    [
        (["--temperature", "-1"], "temperature", 1),
        (["--max-tokens", "0", "--top-p", "2", "--logprobs", "99"], "top_p", 3),
        (["--stop", "", "--compare"], "stop", 1),
    ],
)
def test_bad_values_are_found_before_a_model_is_loaded(
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    option: str,
    num_lines: int,
) -> None:
    monkeypatch.setattr(LLM, "from_config", lambda config: pytest.fail("loaded"))
    assert main(["generate", "--config", config, *options]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"{option} = ")
    assert len(printed.err.splitlines()) == num_lines


def test_a_config_without_a_head_cannot_be_compared(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text(f"model: {tiny_target}\n")
    assert main(["generate", "--config", str(path), "--compare"]) == 1
    assert "speculative_config" in capsys.readouterr().err


def test_a_bad_limit_is_an_error_line_and_not_a_traceback(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--config", config, "--max-tokens", "100000"]) == 1
    assert "max_tokens = 100000" in capsys.readouterr().err


def test_acceptance_counts_decode_tokens_over_decode_forwards(
    config: str, tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "three.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text, "unused"]}) + "\n" for text in ("a", "bc", "def")))
    argv = ["bench", "acceptance", "--config", config, "--max-tokens", "8", "--json", str(prompts)]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [(row["prompts"], row["mode"], row["num_prompts"]) for row in rows] == [
        ("three", "chain", 3),
        ("three", "tree", 3),
    ]
    with LLM(str(tiny_target), dtype="float32", max_seq_len=256) as llm:
        chats = [[{"role": "user", "content": text}] for text in ("a", "bc", "def")]
        outputs = llm.generate(chats, SamplingParams(max_tokens=8))
    decoded = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    for row in rows:
        assert row["num_tokens"] == decoded
        assert row["tokens_per_forward"] == pytest.approx(decoded / row["target_forwards"])


def test_acceptance_shows_what_failed(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    prompts = tmp_path / "long.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("a", "b " * 400)))
    assert main(["bench", "acceptance", "--config", config, "--max-tokens", "8", str(prompts)]) == 0
    assert capsys.readouterr().out.count("long (1, 1 failed)") == 2


def test_acceptance_names_missing_files_and_broken_lines(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "acceptance", "--config", config, "no-such.jsonl", "nor-this.jsonl"]) == 1
    error = capsys.readouterr().err
    assert "no-such.jsonl" in error and "nor-this.jsonl" in error
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"turns": ["fine"]}\n{"turn": 1}\n')
    assert main(["bench", "acceptance", "--config", config, str(broken)]) == 1
    assert "broken.jsonl:2" in capsys.readouterr().err
