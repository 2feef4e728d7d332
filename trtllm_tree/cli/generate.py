"""`trtllm-tree generate`: one prompt through a model; with `--compare`, plain, chain and tree side by side."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from trtllm_tree.cli.request_options import add_request_arguments, params_of
from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.load import RunConfig, load_config
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.errors import ConfigError, Problem

if TYPE_CHECKING:
    from trtllm_tree.llm import LLM
    from trtllm_tree.outputs import RequestOutput

DEFAULT_PROMPT = "Explain in a few sentences why the sky is blue."


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "generate",
        help="generate for one prompt; --compare shows plain, chain and tree",
        description="Generate for one prompt with the model and the draft tree of a config file.",
        allow_abbrev=False,
    )
    add_run_arguments(parser)
    add_request_arguments(parser)
    parser.add_argument(
        "--compare", action="store_true", help="run plain, chain and tree, and say whether they agree"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that runs one prompt."""
    parser.add_argument(
        "--config", metavar="YAML", help="file with TensorRT-LLM's keys (default: K=4, S=5, N=32 on the demo)"
    )
    parser.add_argument("--model", metavar="DIR", help='target model directory, or "demo"')
    parser.add_argument("--speculative-model", metavar="DIR", help='draft head directory, or "demo"')
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="the user's message")
    parser.add_argument("--raw", action="store_true", help="do not put the prompt into the chat template")


def config_of(args: argparse.Namespace) -> RunConfig:
    """The config file, or the demo's config, with the command line's overrides.

    Raises:
        ConfigError: with every problem.
    """
    if args.config is None:
        speculative = SpeculativeConfig(
            tree_topk=4, num_steps=5, num_nodes=32, speculative_model=args.speculative_model
        )
        return RunConfig(engine=EngineConfig(model=args.model or "demo"), speculative=speculative)
    overrides: dict[str, object] = {}
    if args.model is not None:
        overrides["model"] = args.model
    if args.speculative_model is not None:
        overrides["speculative_config"] = {"speculative_model": args.speculative_model}
    config = load_config(args.config, overrides=overrides)
    if not config.engine.model:
        raise ConfigError(
            Problem("model", "", "no model is named", "Add --model DIR, or model: in the file.")
        )
    return config


def prompt_of(llm: LLM, args: argparse.Namespace) -> list[int]:
    """Token ids of the prompt; a chat model gets its template unless --raw is given."""
    if args.raw or llm.tokenizer.chat_template is None:
        return llm.encode(args.prompt)
    return llm.encode([{"role": "user", "content": args.prompt}])


def run(args: argparse.Namespace) -> int:
    """Generate, and print text or the comparison."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = config_of(args)
    params = params_of(args)
    console = Console(stderr=args.json)
    if params.is_sampled and args.seed is None:
        console.print(f"[dim]seed {params.seed}[/dim]", highlight=False)
    if args.compare:
        return _compare(config, params, args, console)
    output, seconds = _timed(config, params, args, warm_up=False)
    report = _report(output, seconds)
    console.print(output.outputs[0].text, markup=False, highlight=False)
    console.print(
        f"[dim]{len(report['token_ids'])} tokens, {report['target_forwards']} target forwards, "
        f"{report['tokens_per_forward']:.2f} tokens per forward, {seconds:.2f} s[/dim]"
    )
    if params.logprobs is not None:
        console.print(_logprob_table(report))
    if args.json:
        print(json.dumps(report | {"text": output.outputs[0].text}))
    return 0


def _compare(config: RunConfig, params: SamplingParams, args: argparse.Namespace, console: Console) -> int:
    import torch

    if config.speculative is None:
        rule = "--compare needs a drafter"
        raise ConfigError(Problem("speculative_config", None, rule, "Add speculative_config to the file."))
    speculative = config.speculative
    if speculative.use_rejection_sampling and params.is_sampled:
        rule = "rejection sampling keeps the law of plain decoding, not its tokens, so there is nothing to compare"
        remedy = "Set use_rejection_sampling to false, or sample nothing: --temperature 0."
        raise ConfigError(Problem("speculative_config.use_rejection_sampling", True, rule, remedy))
    modes: dict[str, SpeculativeConfig | None] = {"plain": None, "chain": speculative}
    if speculative.is_tree:
        modes["chain"] = speculative.as_chain()
        modes["tree"] = speculative
    outputs: dict[str, tuple[RequestOutput, float]] = {}
    for name, mode in modes.items():
        console.print(f"[dim]running {name} ...[/dim]")
        outputs[name] = _timed(replace(config, speculative=mode), params, args, warm_up=True)
    reports: dict[str, Any] = {name: _report(*result) for name, result in outputs.items()}
    identical = all(report["token_ids"] == reports["plain"]["token_ids"] for report in reports.values())
    console.print(list(outputs.values())[-1][0].outputs[0].text, markup=False, highlight=False)
    console.print(_table(reports, speculative))
    verdict = "[green]identical[/green]" if identical else "[red]DIFFERENT[/red]"
    names = "plain, chain and tree" if speculative.is_tree else "plain and chain"
    console.print(f"outputs of {names}: {verdict}")
    if not identical and config.engine.dtype != "float32":
        console.print(
            "[dim]In a 16-bit dtype two runs may part where the best logits nearly tie; float32 shows whether\n"
            "this is all it was.[/dim]"
        )
    if config.engine.device == "cpu" or not torch.cuda.is_available():
        console.print(
            "[dim]On a CPU a forward of many rows costs several plain ones, so look at the forwards: on a GPU both\n"
            "are bound by reading the weights, and fewer forwards mean less time.[/dim]"
        )
    if args.json:
        print(json.dumps(reports | {"identical": identical}))
    return 0 if identical else 1


def _timed(
    config: RunConfig, params: SamplingParams, args: argparse.Namespace, *, warm_up: bool
) -> tuple[RequestOutput, float]:
    """One run in an LLM of its own, and its seconds without loading."""
    from trtllm_tree.llm import LLM

    with LLM.from_config(config) as llm:
        prompt = prompt_of(llm, args)
        if warm_up:
            llm.generate(prompt, SamplingParams(max_tokens=2))
        start = time.perf_counter()
        output = llm.generate(prompt, params)
        return output, time.perf_counter() - start


def _report(output: RequestOutput, seconds: float) -> dict[str, Any]:
    completion = output.outputs[0]
    report = {
        "token_ids": completion.token_ids,
        "target_forwards": output.acceptance.target_forwards,
        "tokens_per_forward": output.acceptance.tokens_per_forward,
        "seconds": seconds,
    }
    if completion.logprobs is not None:
        report["logprobs"] = [
            {token: asdict(scored) for token, scored in entry.items()} for entry in completion.logprobs
        ]
    return report


def _logprob_table(report: dict[str, Any]) -> Table:
    table = Table(title="log-probabilities by the model's raw logits")
    for column in ("token", "logprob", "rank", "likeliest"):
        table.add_column(column, justify="left" if column == "likeliest" else "right")
    for token, entry in zip(report["token_ids"], report["logprobs"], strict=True):
        ranked = sorted(entry.items(), key=lambda item: item[1]["rank"])
        likeliest = ", ".join(
            f"{other} {scored['logprob']:.3f}" for other, scored in ranked if other != token
        )
        table.add_row(
            str(token), f"{entry[token]['logprob']:.3f}", str(entry[token]["rank"]), likeliest or "-"
        )
    return table


def _table(reports: dict[str, Any], config: SpeculativeConfig) -> Table:
    table = Table(title=f"K = {config.tree_topk}, S = {config.num_steps}, N = {config.num_nodes}")
    for column in ("", "tokens", "target forwards", "tokens per forward", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    for name, report in reports.items():
        table.add_row(
            name,
            str(len(report["token_ids"])),
            str(report["target_forwards"]),
            f"{report['tokens_per_forward']:.2f}",
            f"{report['seconds']:.2f}",
        )
    return table
