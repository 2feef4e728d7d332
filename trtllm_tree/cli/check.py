"""`trtllm-tree check`: is this config right, would it start, and with which tree support? Loads no weights.

Nor torch, unless it is asked about TensorRT-LLM where that is installed: what it offers is known once it is imported.

Composes the checks of every layer below (the file, the host, the model directory, the draft head, the attention
backends) and reports all problems together.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_tree.errors import ConfigError, Problem

if TYPE_CHECKING:
    from trtllm_tree.config import Host, RunConfig
    from trtllm_tree.support.plan import PlannedRun

_DEMO = "demo"
# owner/name, which TensorRT-LLM downloads.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "check",
        help="validate a config file and say what it resolves to",
        description="Validate a config file, its model and its draft head, and say what draft trees are supported "
        "with them; for TensorRT-LLM also whether the installed one offers what the config needs. Exit code 1 if "
        "anything is wrong. That TensorRT-LLM is not installed here is not wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file with TensorRT-LLM's keys")
    parser.add_argument(
        "--model", metavar="DIR", help='target model directory, or "demo"; overrides the file'
    )
    parser.add_argument(
        "--speculative-model", metavar="DIR", help='draft head directory, or "demo"; overrides the file'
    )
    parser.add_argument(
        "--host",
        choices=("embedded", "tensorrt_llm"),
        help="check for this host (default: tensorrt_llm where it is installed, else embedded)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and print.

    Raises:
        ConfigError: with every problem; with `--json` they are in the output and the exit code is 1.
    """
    from trtllm_tree.cli.tree_table import tree_report
    from trtllm_tree.config import read_config

    overrides: dict[str, object] = {}
    if args.model is not None:
        overrides["model"] = args.model
    if args.speculative_model is not None:
        overrides["speculative_config"] = {"speculative_model": args.speculative_model}
    host: Host = args.host or _installed_host()
    config, file_problems = read_config(args.config, overrides=overrides)
    if not file_problems:
        file_problems = _nothing_asked(args.config, config)
    planned = planned_run(config, host)
    problems = file_problems + all_problems(config, host, planned)
    # What was read beside errors is not what would run.
    resolved = {} if file_problems else _resolved(config, host)
    tree = tree_report(planned, problems) if resolved and planned.is_tree else None
    installed, lacking = _probed(config) if host == "tensorrt_llm" else (None, [])
    problems += lacking
    if args.json:
        report = {"ok": not problems, "host": host, "resolved": resolved}
        report["tree_support"] = tree
        if installed is not None:
            report["tensorrt_llm"] = installed
        report["problems"] = [asdict(problem) for problem in problems]
        print(json.dumps(report, indent=2, default=str))
        return 1 if problems else 0
    if resolved:
        _print_tables({"config": args.config, "host": host} | resolved, tree, len(problems))
    if installed is not None:
        from trtllm_tree.cli.probe_table import print_probe_table

        print_probe_table(installed)
    if problems:
        raise ConfigError(problems)
    # The tables are long; errors come last as well.
    print(f"{args.config}: OK for host {host}")
    return 0


def all_problems(config: RunConfig, host: Host, planned: PlannedRun) -> list[Problem]:
    """Everything wrong with a config that was read, its models and their backends, as far as files tell."""
    from trtllm_tree.config import host_problems
    from trtllm_tree.support.plan import run_problems

    return host_problems(config, host) + model_problems(config, host) + run_problems(planned)


def _nothing_asked(path: str, config: RunConfig) -> list[Problem]:
    """A file without a key, and no model from the command line: there is nothing that would run."""
    from trtllm_tree.config import EngineConfig, RunConfig

    if config.written or config != RunConfig(engine=EngineConfig(model="")):
        return []
    rule = "names no model and sets no option"
    return [Problem("config file", path, rule, "Write its keys, or add --model DIR.")]


def _probed(config: RunConfig) -> tuple[dict[str, Any], list[Problem]]:
    """What the installed TensorRT-LLM offers, and what `config` needs that it does not."""
    from trtllm_tree.cli.probe_table import probe_data, quiet_probe
    from trtllm_tree.hosts.tensorrt_llm.symbols import TREE_FEATURES

    report = quiet_probe()
    spec = config.speculative
    needed = () if spec is None else (TREE_FEATURES[spec.decoding_type] if spec.is_tree else "chain",)
    problems = report.problems(*needed) if report.version is not None and needed else []
    return probe_data(report), problems


def model_problems(config: RunConfig, host: Host) -> list[Problem]:
    """Everything wrong with the model directory and the draft head, as far as files tell.

    A model that the command line has yet to name is no problem; the head is then checked by itself. So it is
    for the demo's model, which is not converted for this.
    """
    from trtllm_tree.config.host_rules import demo_name_problems

    model = config.engine.model
    problems = demo_name_problems(config) if host == "tensorrt_llm" else []
    target = _local_dir(model, host)
    if target is not None and not (target / "config.json").is_file():
        rule = "must be a directory with a config.json"
        problems.append(
            Problem("model", model, rule, 'Give the directory of a Hugging Face checkpoint, or "demo".')
        )
        target = None
    problems += _drafter_problems(config, target, host)
    if host == "tensorrt_llm" and config.speculative is not None and target is not None and not problems:
        from trtllm_tree.hosts.tensorrt_llm.llm import feature_problems

        problems += feature_problems(config.speculative, str(target))
    return problems + _kv_scale_problems(config, host, target)


def _kv_scale_problems(config: RunConfig, host: Host, target: Path | None) -> list[Problem]:
    """Scales that an FP8 cache would not honour. TensorRT-LLM's own attention does; tree attention knows none."""
    from trtllm_tree.support.kv_scales import kv_scale_problems

    spec = config.speculative
    is_ours = host == "embedded" or (spec is not None and spec.is_tree)
    if config.engine.kv_cache_dtype != "fp8" or not is_ours:
        return []
    head = _local_dir(spec.speculative_model, host) if spec else None
    folders = (("model", target), ("speculative_model", head))
    return [p for option, folder in folders if folder for p in kv_scale_problems(folder, option)]


def planned_run(config: RunConfig, host: Host) -> PlannedRun:
    """The run as far as config files of both models and the machine's first GPU tell."""
    from trtllm_tree.demo.target import converted_target_dir
    from trtllm_tree.support.gpus import gpu_capabilities
    from trtllm_tree.support.model_facts import read_model_facts
    from trtllm_tree.support.plan import PlannedRun

    target = _local_dir(config.engine.model, host)
    if config.engine.model == _DEMO:
        target = converted_target_dir()
    head = _head_dir(config.speculative.speculative_model, host) if config.speculative else None
    gpus = None if config.engine.device == "cpu" else gpu_capabilities()
    return PlannedRun(
        config=config,
        host=host,
        target=read_model_facts(target) if target is not None else None,
        draft=read_model_facts(head) if head is not None else None,
        capability=gpus[0] if gpus else None,
    )


def _drafter_problems(config: RunConfig, target: Path | None, host: Host) -> list[Problem]:
    """What is wrong with a draft head, or with the weights of the target's MTP layer where drafting is ours."""
    from trtllm_tree.support.head import head_problems, head_problems_for
    from trtllm_tree.support.model_facts import read_model_facts
    from trtllm_tree.support.mtp_weights import mtp_weight_problems

    spec = config.speculative
    if spec is not None and spec.decoding_type == "MTP":
        facts = read_model_facts(target) if target is not None else None
        is_ours = host == "embedded" or spec.is_tree
        if target is None or facts is None or not is_ours:
            return []
        return mtp_weight_problems(target, facts, host)
    head_dir = None if spec is None else _head_dir(spec.speculative_model, host)
    if head_dir is None:
        return []
    return head_problems_for(head_dir, None) if target is None else head_problems(head_dir, target)


def _head_dir(name: str | None, host: Host) -> Path | None:
    """As `_local_dir`, but the demo's head comes with the package."""
    from trtllm_tree.demo import resolve_head

    return resolve_head(_DEMO) if name == _DEMO else _local_dir(name, host)


def _local_dir(name: str | None, host: Host) -> Path | None:
    """The directory that `name` must be; None if nothing is to be looked up on this machine."""
    if not name or name == _DEMO:
        return None
    path = Path(name).expanduser()
    if host == "tensorrt_llm" and _HUB_NAME.fullmatch(name) and not path.exists():
        return None
    return path


def _installed_host() -> Host:
    return "tensorrt_llm" if importlib.util.find_spec("tensorrt_llm") else "embedded"


def _resolved(config: RunConfig, host: Host) -> dict[str, Any]:
    """What the config comes to; None is decided later. The limits of TensorRT-LLM are its own business."""
    engine, spec = config.engine, config.speculative
    found: dict[str, Any] = {"model": engine.model or None, "dtype": engine.dtype}
    found["kv_cache_dtype"] = engine.kv_cache_dtype
    if host == "embedded":
        names = ("max_batch_size", "max_num_tokens", "max_seq_len", "tokens_per_block", "kv_cache_tokens")
        found |= {name: getattr(engine, name) for name in names}
    found["speculation"] = "off" if spec is None else "draft tree" if spec.is_tree else "chain"
    if spec is not None:
        names = (
            "decoding_type",
            "speculative_model",
            "tree_topk",
            "num_steps",
            "num_nodes",
            "mask_words",
            "num_entries",
        )
        found |= {name: getattr(spec, name) for name in (*names, "lane_window", "max_path_len")}
    kept = {*config.extra} | ({*spec.host_options} if spec else set())
    return found | {"kept_for_tensorrt_llm": sorted(kept), "env_overrides": config.env_overrides}


def _print_tables(found: dict[str, Any], tree: dict[str, Any] | None, num_problems: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from trtllm_tree.cli.tree_table import print_tree_tables

    symbols = {"tree_topk": " (K)", "num_steps": " (S)", "num_nodes": " (N)"}
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in found.items():
        if isinstance(value, dict):
            value = [f"{key}={item}" for key, item in value.items()]
        text = ", ".join(value) if isinstance(value, list) else str(value)
        table.add_row(name + symbols.get(name, ""), "-" if value in (None, []) else text)
    table.add_section()
    table.add_row("result", f"{num_problems} problem{'s' * (num_problems > 1)}" if num_problems else "OK")
    console = Console(markup=False, highlight=False)
    console.print(table)
    if tree is not None:
        print_tree_tables(tree, console)
