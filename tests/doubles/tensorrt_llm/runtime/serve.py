"""`trtllm-serve` without a server: reads the command line and the YAML, and reports what it found."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _Command:
    """Called as a click group is: with its arguments or the process's, and it ends by SystemExit."""

    def __call__(self, args: Sequence[str] | None = None, prog_name: str | None = None) -> None:
        """Load the model, print one line of JSON about what serves it, and end."""
        parser = argparse.ArgumentParser(prog=prog_name or "trtllm-serve")
        parser.add_argument("model")
        parser.add_argument("--extra_llm_api_options", "--config", dest="options")
        parser.add_argument("--custom_module_dirs", action="append", default=[])
        parser.add_argument("--host")
        parser.add_argument("--port", type=int)
        arguments = list(sys.argv[1:] if args is None else args)
        known = parser.parse_args(arguments[1:] if arguments[:1] == ["serve"] else arguments)
        for folder in known.custom_module_dirs:
            import_custom_module_from_dir(folder)
        settings = {} if known.options is None else _yaml(Path(known.options))
        print(json.dumps(report(known.model, settings)))
        raise SystemExit(0)


main = _Command()


def import_custom_module_from_dir(custom_module_dir: str) -> None:
    """Import a folder as a package, by its own name."""
    folder = Path(custom_module_dir).resolve()
    sys.path.insert(0, str(folder.parent))
    importlib.import_module(folder.name)


def report(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What a server would run: the model is loaded, so whatever refuses to start does so here."""
    from .llm import LLM

    with LLM(model, **settings) as llm:
        target, spec = llm.executor.model, llm.args.speculative_config
        layer = target.model.layers[0].self_attn
        attention = getattr(layer, "attn", None) or layer.mqa
        return {
            "speculative_config": None if spec is None else spec.model_dump(mode="json", exclude_none=True),
            "model": f"{type(target).__module__}.{type(target).__qualname__}",
            "worker": None if target.spec_worker is None else type(target.spec_worker).__name__,
            "fmha_libs": [type(library).__name__ for library in attention._fmha_manager.fmha_libs],
        }


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
