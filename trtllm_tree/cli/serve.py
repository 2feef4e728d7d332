"""`trtllm-tree serve`: trtllm-serve's own server, with the plugin in it and the config checked before it starts.

Owns what is checked and which variables are set before. What stands behind MODEL is trtllm-serve's; so is the server.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from trtllm_tree.errors import ConfigError, HostUnavailableError, Problem, UnsupportedError

if TYPE_CHECKING:
    from trtllm_tree.config import RunConfig

# Names of the YAML file's option: newer versions know both.
_CONFIG = ("--config", "--extra_llm_api_options")
_HOST = "tensorrt_llm"
_MISSING = "TensorRT-LLM is not installed here. Install tensorrt_llm (NVIDIA's containers bring it)."


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, through trtllm-serve with the plugin in it",
        description="Check a config file, register the plugin, and run trtllm-serve with it. Options of this command "
        "stand before MODEL, trtllm-serve's own (--host, --port, --tp_size, ...) behind it; --config is taken from "
        "either place.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host",
        metavar="RUNTIME",
        default=_HOST,
        help="the runtime; %(default)s, the default, is the only one with a server",
    )
    parser.add_argument(*_CONFIG, metavar="YAML", dest="config", help="file with TensorRT-LLM's keys")
    parser.add_argument(
        "model", metavar="MODEL", help="target model directory, or a name that TensorRT-LLM downloads"
    )
    parser.add_argument(
        "arguments",
        metavar="...",
        nargs=argparse.REMAINDER,
        help="options of trtllm-serve, passed on as they are",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until it ends.

    Raises:
        HostUnavailableError: TensorRT-LLM is not installed.
        ConfigError, UnsupportedError: with every problem, before anything is loaded.
    """
    path, passed_on = _config_option(args)
    if args.host != _HOST:
        raise UnsupportedError(_host_problem(args.host))
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise HostUnavailableError(_MISSING)
    config = _checked(path, args.model)
    # Without the name of a subcommand it serves.
    arguments = [args.model, *passed_on]
    if path is not None:
        # The one name that all versions know.
        arguments += [_CONFIG[1], path]
    return _serve(config, arguments)


def _host_problem(host: str) -> Problem:
    if host == "embedded":
        rule, remedy = "the embedded host has no server yet", f"Use --host {_HOST}, or LLM(...) in Python."
    else:
        rule = f"must be {_HOST} before MODEL"
        remedy = "Write the server's own --host, an address, behind MODEL."
    return Problem("--host", host, rule, remedy)


def _config_option(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """The config file, wherever it stands, and the other arguments behind MODEL."""
    behind = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    behind.add_argument(*_CONFIG, dest="config")
    found, rest = behind.parse_known_args(args.arguments)
    if args.config is not None and found.config is not None:
        rule = f"is given twice, {args.config!r} before MODEL"
        raise ConfigError(Problem("--config", found.config, rule, "Remove one of them."))
    return args.config or found.config, rest


def _checked(path: str | None, model: str) -> RunConfig:
    """The config, with the model that is served, and nothing wrong with it."""
    from trtllm_tree.cli.check import all_problems, planned_run
    from trtllm_tree.config import EngineConfig, RunConfig, read_config

    if path is None:
        return RunConfig(engine=EngineConfig(model=model))
    config, problems = read_config(path, overrides={"model": model})
    problems += all_problems(config, _HOST, planned_run(config, _HOST))
    if problems:
        raise ConfigError(problems)
    return config


def _serve(config: RunConfig, arguments: list[str]) -> int:
    """Run trtllm-serve in this process, as its console script does."""
    from trtllm_tree.hosts.tensorrt_llm import plugin
    from trtllm_tree.hosts.tensorrt_llm.llm import run_environment
    from trtllm_tree.hosts.tensorrt_llm.probe import probe
    from trtllm_tree.hosts.tensorrt_llm.symbols import TREE_FEATURES

    spec = config.speculative
    is_tree = spec is not None and spec.is_tree
    # Ranks get them from here, whatever the file says.
    os.environ.update(run_environment(config))
    probe().require("serve", *([TREE_FEATURES[spec.decoding_type]] if spec and is_tree else []))
    if is_tree:
        plugin.register(required=True)
    command: Any = importlib.import_module("tensorrt_llm.commands.serve").main
    sys.argv = ["trtllm-serve", *arguments]
    try:
        command()
    # A click command ends the process itself.
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    return 0
