"""Tokens per target forward of a draft head over prompt files, for the chain and for the tree.

A prompt file is JSON lines with a `turns` list (the layout of MT-bench questions); the first turn is sent through
the chat template. Counted are decode forwards only: the bonus token is in, the token that prefill predicts is
out, and tokens behind a stop condition are out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trtllm_tree.config.load import RunConfig
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.errors import ConfigError, Problem
from trtllm_tree.llm import LLM


@dataclass(frozen=True)
class AcceptanceRow:
    """One prompt file under one mode.

    Attributes:
        tokens_per_forward: all kept tokens over all decode forwards of the file's requests.
        seconds: wall time of the file, prefill included.
    """

    prompts: str
    mode: str
    num_prompts: int
    num_tokens: int
    target_forwards: int
    tokens_per_forward: float
    seconds: float


def read_prompts(path: Path) -> list[str]:
    """First turns of a prompt file.

    Raises:
        ConfigError: a line without `turns`.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            prompts.append(str(json.loads(line)["turns"][0]))
        except (ValueError, LookupError, TypeError) as error:
            rule = "each line must be a JSON object with a list `turns`"
            raise ConfigError(Problem(f"{path.name}:{number}", line[:40], rule, "Mend the line.")) from error
    return prompts


def measure(config: RunConfig, files: Sequence[Path], *, max_tokens: int) -> list[AcceptanceRow]:
    """Run every file with chain and tree of `config` (greedy)."""
    tree = config.speculative
    if tree is None:
        rule = "acceptance needs a draft head"
        raise ConfigError(Problem("speculative_config", None, rule, "Add speculative_config to the file."))
    chain = SpeculativeConfig(tree_topk=1, num_steps=tree.num_steps, speculative_model=tree.speculative_model)
    rows = []
    for mode, speculative in (("chain", chain), ("tree", tree)):
        with LLM.from_config(_with(config, speculative)) as llm:
            rows += [_measure_file(llm, mode, path, max_tokens) for path in files]
    return rows


def _with(config: RunConfig, speculative: SpeculativeConfig) -> RunConfig:
    return RunConfig(
        engine=config.engine,
        speculative=speculative,
        env_overrides=config.env_overrides,
        extra=config.extra,
    )


def _measure_file(llm: LLM, mode: str, path: Path, max_tokens: int) -> AcceptanceRow:
    chats = [[{"role": "user", "content": prompt}] for prompt in read_prompts(path)]
    start = time.perf_counter()
    outputs = llm.generate(chats, SamplingParams(max_tokens=max_tokens))
    seconds = time.perf_counter() - start
    forwards = sum(output.acceptance.target_forwards for output in outputs)
    tokens = sum(sum(output.acceptance.accept_lens) for output in outputs)
    return AcceptanceRow(path.stem, mode, len(outputs), tokens, forwards, tokens / forwards, seconds)


def to_json(rows: Sequence[AcceptanceRow]) -> str:
    """One JSON list."""
    return json.dumps([asdict(row) for row in rows])
