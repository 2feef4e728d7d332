"""Entry point of `trtllm-tree`: picks the subcommand and turns user errors into lines on stderr.

Knows no option of any subcommand. Subcommands import what is heavy inside `run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trtllm_tree import __version__
from trtllm_tree.cli import bench, check, generate, serve, trace
from trtllm_tree.errors import TreeError

COMMANDS = (generate, trace, check, bench, serve)


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="trtllm-tree", description="Draft-tree speculative decoding.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"trtllm-tree {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit code: the command's own, or 1 for an error of the user, printed one problem a line. Wrong
        usage of the command line leaves through argparse with code 2.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except TreeError as error:
        print(error, file=sys.stderr)
        return 1
