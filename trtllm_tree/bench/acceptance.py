"""Tokens per target forward of a draft head over prompt files, for the chain and for the tree.

A prompt file is JSON lines with a `turns` list (the layout of MT-bench questions); the first turn is sent through
the chat template. Counted are decode forwards only: the bonus token is in, the token that prefill predicts is
out, and tokens behind a stop condition are out. A request that fails is logged with its line and counted apart.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trtllm_tree.config.load import RunConfig
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.errors import ConfigError, Problem
from trtllm_tree.llm import LLM

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class AcceptanceRow:
    """One prompt file under one mode.

    Attributes:
        num_prompts: prompts that were served; the figures are theirs.
        num_failed: prompts that were not.
        tokens_per_forward: all kept tokens over all decode forwards of the file's requests.
        seconds: wall time of the file, prefill included.
    """

    prompts: str
    mode: str
    num_prompts: int
    num_failed: int
    num_tokens: int
    target_forwards: int
    tokens_per_forward: float
    seconds: float


def read_prompts(path: Path) -> list[str]:
    """First turns of a prompt file.

    Raises:
        ConfigError: it is no text, has no line, or has lines without `turns`; all of them.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must be a readable file of UTF-8 text ({error})"
        raise ConfigError(Problem("prompts", str(path), rule, "Name JSON-lines files.")) from error
    if not lines:
        rule = "must have at least one line"
        raise ConfigError(Problem("prompts", str(path), rule, "Name a file with prompts."))
    turns = [_first_turn(line) for line in lines]
    rule = "each line must be a JSON object with a list `turns` that begins with a text"
    problems = [
        Problem(f"{path.name}:{number}", line[:40], rule, "Mend the line.")
        for number, (line, turn) in enumerate(zip(lines, turns, strict=True), start=1)
        if turn is None
    ]
    if problems:
        raise ConfigError(problems)
    return [turn for turn in turns if turn is not None]


def _first_turn(line: str) -> str | None:
    try:
        turns = json.loads(line)["turns"]
    except (ValueError, LookupError, TypeError):
        return None
    return turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0] else None


def measure(config: RunConfig, files: Sequence[Path], *, max_tokens: int) -> list[AcceptanceRow]:
    """Run every file with chain and tree of `config` (greedy).

    Raises:
        ConfigError: no drafter, a bad file, or nothing to measure: no prompt of a file was decoded.
    """
    tree = config.speculative
    if tree is None:
        rule = "acceptance needs a drafter"
        raise ConfigError(Problem("speculative_config", None, rule, "Add speculative_config to the file."))
    if max_tokens < 2:
        rule = "must be at least 2: prefill predicts the first token, and no draft is verified for it"
        raise ConfigError(Problem("max_tokens", max_tokens, rule, "Set max_tokens to 64."))
    prompts = {path: read_prompts(path) for path in files}
    rows = []
    for mode, speculative in (("chain", tree.as_chain()), ("tree", tree)):
        with LLM.from_config(_with(config, speculative)) as llm:
            rows += [_measure_file(llm, mode, path, prompts[path], max_tokens) for path in files]
    return rows


def _with(config: RunConfig, speculative: SpeculativeConfig) -> RunConfig:
    return RunConfig(
        engine=config.engine,
        speculative=speculative,
        env_overrides=config.env_overrides,
        extra=config.extra,
    )


def _measure_file(llm: LLM, mode: str, path: Path, prompts: Sequence[str], max_tokens: int) -> AcceptanceRow:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(chats, SamplingParams(max_tokens=max_tokens))
    seconds = time.perf_counter() - start
    errors = [(number, out.error) for number, out in enumerate(outputs, start=1) if out.error is not None]
    for number, error in errors:
        _LOGGER.warning("%s:%d (%s) failed and is not counted: %s", path.name, number, mode, error)
    forwards = sum(output.acceptance.target_forwards for output in outputs if output.error is None)
    tokens = sum(sum(output.acceptance.accept_lens) for output in outputs if output.error is None)
    if not forwards:
        reason = f" (line {errors[0][0]}: {errors[0][1]})" if errors else ""
        rule = f"none of its {len(outputs)} prompts was decoded behind prefill{reason}"
        raise ConfigError(Problem("prompts", str(path), rule, "Change the prompts, or max_tokens."))
    return AcceptanceRow(
        prompts=path.stem,
        mode=mode,
        num_prompts=len(outputs) - len(errors),
        num_failed=len(errors),
        num_tokens=tokens,
        target_forwards=forwards,
        tokens_per_forward=tokens / forwards,
        seconds=seconds,
    )


def to_json(rows: Sequence[AcceptanceRow]) -> str:
    """One JSON list."""
    return json.dumps([asdict(row) for row in rows])
