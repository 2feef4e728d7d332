"""`trtllm-tree trace`: one prompt through a model, with every round's draft tree drawn on an HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_tree.cli.generate import add_run_arguments, config_of, prompt_of
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.errors import ConfigError, Problem, RequestError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "trace",
        help="draw the draft tree of every round on an HTML page",
        description="Generate for one prompt, and write a page that shows each round's draft tree.",
        allow_abbrev=False,
    )
    parser.add_argument("--html", metavar="FILE", required=True, help="the page to write")
    add_run_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate (default: 64)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate with a recorder, and write the page.

    Raises:
        ConfigError: also for a FILE that cannot be written.
        RequestError: a limit that cannot be served.
    """
    from transformers.utils.logging import disable_progress_bar

    from trtllm_tree.llm import LLM
    from trtllm_tree.trace import TraceRecorder, render_html

    path = _page_path(args.html)
    params = SamplingParams(max_tokens=args.max_tokens)
    if problems := params.validate():
        raise RequestError(problems)
    config = config_of(args)
    speculative = config.speculative
    if speculative is None:
        rule = "without a drafter there is no tree to draw"
        raise ConfigError(Problem("speculative_config", None, rule, "Add speculative_config to the file."))
    disable_progress_bar()
    recorder = TraceRecorder()
    with LLM.from_config(config) as llm:
        assert llm.spec_round is not None, "a speculative config builds a round"
        llm.spec_round.observer = recorder
        output = llm.generate(prompt_of(llm, args), params)
        decode = _token_text(llm.tokenizer)
    acceptance = output.acceptance
    # A stop condition may cut tokens that the last round kept.
    rounds = [
        replace(traced, num_output=count)
        for traced, count in zip(recorder.rounds, acceptance.accept_lens, strict=True)
    ]
    summary = {
        "tokens per target forward": f"{acceptance.tokens_per_forward:.2f}",
        "tokens": len(output.outputs[0].token_ids),
        "rounds (target forwards)": acceptance.target_forwards,
        "K, lanes per step": speculative.tree_topk,
        "S, draft steps": speculative.num_steps,
        "N, tree nodes": speculative.num_nodes,
    }
    title = f"Draft {'trees' if speculative.is_tree else 'chains'} of {config.engine.model}"
    page = render_html(rounds, decode, title=title, summary=summary, prompt=args.prompt)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise _html_error(args.html, f"cannot be written ({error.strerror})") from error
    print(
        f"{path}: {acceptance.target_forwards} rounds, "
        f"{acceptance.tokens_per_forward:.2f} tokens per target forward"
    )
    return 0


def _page_path(name: str) -> Path:
    """Where the page goes; looked at before the model is loaded, which takes a while."""
    path = Path(name).expanduser()
    if not path.parent.is_dir():
        raise _html_error(name, "its directory does not exist")
    if path.is_dir():
        raise _html_error(name, "is a directory")
    return path


def _html_error(name: str, rule: str) -> ConfigError:
    return ConfigError(Problem("--html", name, rule, "Name a file in a directory that you can write to."))


def _token_text(tokenizer: Any) -> Callable[[int], str]:
    """The text of single tokens, special ones included."""
    backend = tokenizer.backend_tokenizer
    # Some decoders drop the space before a text's first token, so a token is decoded behind another one.
    lead = backend.encode("a", add_special_tokens=False).ids
    start = len(backend.decode(lead, skip_special_tokens=False))
    return lambda token: backend.decode([*lead, token], skip_special_tokens=False)[start:]
