"""How `check` shows what the installed TensorRT-LLM offers: features and mismatches, as data and as a table.

Decides nothing: the host's probe does.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from typing import Any

from trtllm_tree.hosts.tensorrt_llm.probe import NOT_INSTALLED, ProbeReport, probe
from trtllm_tree.hosts.tensorrt_llm.symbols import FEATURES
from trtllm_tree.support.report import Refused


def quiet_probe() -> ProbeReport:
    """Probe, and leave stdout to our own output: TensorRT-LLM greets there when it is imported."""
    with contextlib.redirect_stdout(sys.stderr):
        return probe()


def probe_data(report: ProbeReport) -> dict[str, Any]:
    """What `check --json` says about the installed TensorRT-LLM; the table shows the same."""
    features = []
    for feature in FEATURES:
        answer = report.answer(feature.id)
        reason = answer.reason if isinstance(answer, Refused) else ""
        verdict = "missing" if reason else "available"
        lacks = [need for need in feature.needs if isinstance(report.answer(need), Refused)]
        row = {"id": feature.id, "what": feature.what, "verdict": verdict, "lacks": lacks, "reason": reason}
        features.append(row)
    return {
        "installed": report.version is not None,
        "version": report.version,
        "features": features if report.version is not None else [],
        "symbols": {".".join(key): found.path for key, found in report.resolved.items()},
        "mismatches": [asdict(mismatch) for mismatch in report.mismatches],
    }


def print_probe_table(data: dict[str, Any]) -> None:
    """Print `probe_data`; one line where TensorRT-LLM is not installed."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    if not data["installed"]:
        console.print(f"{NOT_INSTALLED}.")
        return
    title = f"TensorRT-LLM {data['version']}: {len(data['symbols'])} symbols fit, {len(data['mismatches'])} do not"
    table = Table("feature", "verdict", "what it lacks", title=title)
    for feature in data["features"]:
        own = [
            f"{mismatch['path']}: {mismatch['rule']}"
            for mismatch in data["mismatches"]
            if feature["id"] in mismatch["features"]
        ]
        own += [f"feature {need}" for need in feature["lacks"]]
        table.add_row(f"{feature['id']}: {feature['what']}", feature["verdict"], "\n".join(own) or "-")
    console.print(table)
