"""`trtllm-tree bench`: measurements from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_tree.errors import ConfigError, Problem


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("bench", help="measure", description="Measure.", allow_abbrev=False)
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="KIND")
    acceptance = kinds.add_parser(
        "acceptance", help="tokens per target forward over prompt files", allow_abbrev=False
    )
    acceptance.add_argument("prompts", nargs="+", metavar="FILE", help="JSON lines with a list `turns`")
    acceptance.add_argument("--config", metavar="YAML", required=True, help="file with TensorRT-LLM's keys")
    acceptance.add_argument("--max-tokens", type=int, default=64, help="new tokens a prompt (default: 64)")
    acceptance.add_argument("--json", action="store_true", help="print one JSON list as the last line")
    acceptance.set_defaults(run=run_acceptance)


def run_acceptance(args: argparse.Namespace) -> int:
    """Measure and print a table."""
    from rich.console import Console
    from rich.table import Table
    from transformers.utils.logging import disable_progress_bar

    from trtllm_tree.bench.acceptance import measure, to_json
    from trtllm_tree.config.load import load_config

    files = [Path(name) for name in args.prompts]
    if missing := [path for path in files if not path.is_file()]:
        rule, remedy = "must be a readable file", "Name JSON-lines files."
        raise ConfigError([Problem("prompts", str(path), rule, remedy) for path in missing])
    disable_progress_bar()
    rows = measure(load_config(args.config), files, max_tokens=args.max_tokens)
    table = Table(title=f"greedy, first {args.max_tokens} new tokens")
    for column in ("prompts", "mode", "tokens", "target forwards", "tokens per forward", "seconds"):
        table.add_column(column)
    for row in rows:
        numbers = (str(row.num_tokens), str(row.target_forwards), f"{row.tokens_per_forward:.3f}")
        table.add_row(f"{row.prompts} ({row.num_prompts})", row.mode, *numbers, f"{row.seconds:.1f}")
    Console(stderr=args.json).print(table)
    if args.json:
        print(to_json(rows))
    return 0
