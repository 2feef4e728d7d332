"""`trtllm-tree bench`: measurements from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_tree.errors import ConfigError, Problem

if TYPE_CHECKING:
    from trtllm_tree.bench.ops.report import Row


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
    ops = kinds.add_parser("ops", help="time every op on a GPU against its floor", allow_abbrev=False)
    ops.add_argument("--op", nargs="+", action="extend", default=[], metavar="NAME", help="these ops only")
    ops.add_argument("--quick", action="store_true", help="an op's first shapes only, with fewer replays")
    ops.add_argument("--skip-tests", action="store_true", help="time ops without running their tests first")
    ops.add_argument("--commit", metavar="TEXT", help="commit to name where this is no git checkout")
    ops.add_argument("--json-out", metavar="FILE", help="write the rows as one JSON list")
    ops.add_argument("--markdown-out", metavar="FILE", help="write the table as Markdown")
    ops.add_argument("--plot-out", metavar="FILE", help="write the roofline plot as SVG")
    ops.set_defaults(run=run_ops)


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
        failed = f", {row.num_failed} failed" if row.num_failed else ""
        name = f"{row.prompts} ({row.num_prompts}{failed})"
        table.add_row(name, row.mode, *numbers, f"{row.seconds:.1f}")
    Console(stderr=args.json).print(table)
    if args.json:
        print(to_json(rows))
    return 0


def run_ops(args: argparse.Namespace) -> int:
    """Measure, print a table, write the files that were asked for."""
    from rich.console import Console

    from trtllm_tree.bench import ops
    from trtllm_tree.bench.ops import report
    from trtllm_tree.bench.ops.plot import roofline_svg
    from trtllm_tree.bench.ops.registry import entries

    chosen = entries(args.op)
    ops.require_cuda()
    outputs = [Path(name) for name in (args.json_out, args.markdown_out, args.plot_out) if name]
    if missing := [path for path in outputs if not path.parent.is_dir()]:
        rule, remedy = "must lie in a folder that exists", "Make the folder first."
        raise ConfigError([Problem("output file", str(path), rule, remedy) for path in missing])
    notes = Console(stderr=True, highlight=False)

    def write(rows: Sequence[Row]) -> None:
        for name, to_text in ((args.json_out, report.to_json), (args.markdown_out, report.to_markdown)):
            if name:
                Path(name).write_text(to_text(rows), encoding="utf-8")

    rows = ops.measure(
        chosen,
        quick=args.quick,
        skip_tests=args.skip_tests,
        commit=args.commit,
        on_note=lambda text: notes.print(text, style="dim", soft_wrap=True),
        on_rows=write,
    )
    # A table folded into the 80 columns of a pipe cannot be read.
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(report.to_table(rows))
    if args.plot_out:
        Path(args.plot_out).write_text(roofline_svg(rows, ops.ceilings_of_rows(rows)), encoding="utf-8")
    return 0
