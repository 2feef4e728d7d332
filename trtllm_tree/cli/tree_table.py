"""How `check` shows tree support: the scope's lines and the backends of one planned run, as data and as tables.

Decides nothing: `support.plan` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trtllm_tree.errors import Problem
from trtllm_tree.support.model_facts import ModelFacts
from trtllm_tree.support.plan import PlannedRun, leaf_table, part_answers, scope_rows, serving_leaves
from trtllm_tree.support.report import Refused

if TYPE_CHECKING:
    from rich.console import Console

_FACTS = (
    "model_type", "num_heads", "num_kv_heads", "head_dim", "value_dim", "layer_kinds", "sliding_window", "sinks",
    "dtype", "quantization",
)  # fmt: skip


def tree_report(run: PlannedRun, problems: Sequence[Problem]) -> dict[str, Any]:
    """What `check --json` says about trees; the tables show the same."""
    scope = [
        {"id": row.line.id, "what": row.line.what, "verdict": row.verdict, "reason": row.reason}
        for row in scope_rows(run, problems)
    ]
    return {
        "host": run.host,
        "gpu": run.capability,
        "scope": scope,
        "backends": _backends(run),
        "models": {"target": _facts(run.target), "draft": _facts(run.drafter)},
        "leaves": leaf_table(run),
        "serving": serving_leaves(run),
    }


def print_tree_tables(report: dict[str, Any], console: Console) -> None:
    """Print the scope in this run, what the models ask of attention, and the leaves that could serve the target."""
    from rich.table import Table

    title, caption = (
        f"Tree support on {report['host']}",
        "blocked: asked for here; refused: not to be had here",
    )
    scope = Table("draft trees", "verdict", "why", title=title, caption=caption)
    for row in report["scope"]:
        scope.add_row(row["what"], row["verdict"], row["reason"] or "-")
    scope.add_section()
    for row in report["backends"]:
        why = ": ".join(filter(None, (row["backend"], row["reason"])))
        scope.add_row(f"{row['part']} attention backend", row["verdict"], why)
    console.print(scope)
    models = {name: facts for name, facts in report["models"].items() if facts}
    if models:
        table = Table("attention of", *models, title="Models")
        for name in _FACTS:
            table.add_row(name, *(_text(facts[name]) for facts in models.values()))
        console.print(table)
    if report["leaves"]:
        leaves = Table("leaf", *report["serving"], "why not", title="Leaves for the target")
        for leaf, reasons in report["leaves"].items():
            # Each rule once, without the machine that breaks it: that is the column.
            rules = dict.fromkeys(
                reason.partition(", and this ")[0] for each in reasons.values() for reason in each
            )
            leaves.add_row(leaf, *("no" if each else "yes" for each in reasons.values()), "; ".join(rules))
        leaves.add_section()
        leaves.add_row(
            f"serves on {report['host']}", *(name or "none" for name in report["serving"].values())
        )
        console.print(leaves)


def _backends(run: PlannedRun) -> list[dict[str, Any]]:
    """The answers for both parts, also where there is nobody to ask."""
    found = [
        (
            answer.part,
            answer.backend,
            "blocked" if isinstance(answer.answer, Refused) else "supported",
            answer.answer.reason if isinstance(answer.answer, Refused) else "",
        )
        for answer in part_answers(run)
    ]
    if not found:
        asked = {"the model": run.target} | ({} if run.drafts_with_mtp else {"the head": run.draft})
        missing = [name for name, facts in asked.items() if run.shape(facts, run.capability) is None]
        why = "no GPU was seen here"
        if missing:
            why = f"needs a config.json of {' and '.join(missing)} that says its heads"
        found = [(part, None, "unknown", why) for part in ("verify", "lanes")]
    return [dict(zip(("part", "backend", "verdict", "reason"), each, strict=True)) for each in found]


def _facts(facts: ModelFacts | None) -> dict[str, Any] | None:
    return None if facts is None else {name: value for name, value in asdict(facts).items() if name in _FACTS}


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else "-" if value is None else str(value)
