"""Where an importable `tensorrt_llm` differs from what the doubles say of it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from tests.doubles.tensorrt_llm import LAYOUTS, Entry, double_entries


def closest_layout() -> tuple[str, list[str]]:
    """The layout of the doubles that the importable package is most like, and all in which they differ."""
    found = {layout: differences(double_entries(layout)) for layout in LAYOUTS}
    layout = min(found, key=lambda name: len(found[name]))
    return layout, found[layout]


def differences(entries: list[Entry]) -> list[str]:
    """One line for each name, parameter or default that is not there as the entries have it."""
    found: list[str] = []
    for entry in entries:
        path = f"{entry['module']}.{entry['name']}"
        try:
            owner = getattr(importlib.import_module(entry["module"]), entry["name"], None)
        except ImportError as error:
            found.append(f"{path}: {error}")
            continue
        if entry["kind"] == "absent":
            found += [f"{path}: is there"] if owner is not None else []
        elif owner is None:
            found.append(f"{path}: is missing")
        else:
            found += _of_entry(entry, path, owner)
    return found


def _of_entry(entry: Entry, path: str, owner: Any) -> list[str]:
    if entry["kind"] == "function":
        return _of_signature(path, owner, entry["params"])
    found = []
    names = [field.partition("=")[0] for field in entry.get("fields", ())]
    there = {*dir(owner), *getattr(owner, "model_fields", ()), *getattr(owner, "__dataclass_fields__", ())}
    # Annotations without a value, of plain classes.
    there.update(
        name for base in getattr(owner, "__mro__", ()) for name in vars(base).get("__annotations__", ())
    )
    for name in [*names, *entry.get("properties", ()), *entry.get("attributes", ())]:
        if name not in there:
            found.append(f"{path}.{name}: is missing")
    for name, params in (entry.get("methods", {}) | entry.get("classmethods", {})).items():
        method = getattr(owner, name, None)
        if method is None:
            found.append(f"{path}.{name}: is missing")
        else:
            found += _of_signature(f"{path}.{name}", inspect.getattr_static(owner, name), params)
    for name in entry.get("final", ()):
        if not getattr(getattr(owner, name, None), "__final__", False):
            found.append(f"{path}.{name}: is not final")
    return found


def _of_signature(path: str, function: Any, params: list[str]) -> list[str]:
    """`params` are written as in Python; what is there besides must have a default."""
    function = getattr(function, "__func__", function)
    try:
        there = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        return [f"{path}: {error}"]
    found, named = [], []
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in there.values())
    for param in params:
        name, _, default = param.partition("=")
        if name.startswith("*"):
            continue
        named.append(name)
        if name not in there:
            found += [] if takes_any else [f"{path}: parameter {name} is missing"]
        elif bool(default) != (there[name].default is not inspect.Parameter.empty):
            found.append(f"{path}: parameter {name} has {'no' if default else 'a'} default")
    for name, parameter in there.items():
        is_needed = parameter.default is inspect.Parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if is_needed and name not in named:
            found.append(f"{path}: parameter {name} is new")
    return found
