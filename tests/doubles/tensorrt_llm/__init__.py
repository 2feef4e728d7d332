"""A package that looks like TensorRT-LLM as far as names and signatures go, written from `signatures.json`.

Its functions do nothing; it is there for the probe, and for what a renamed or missing symbol does to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYOUTS = ("new", "old", "1.2.1")
_BODY = "raise NotImplementedError('contract double')"
Entry = dict[str, Any]


def double_version(layout: str) -> str:
    """What the double of this layout calls itself."""
    return _facts()["versions"][layout]


def double_entries(layout: str) -> list[Entry]:
    """The symbols of a layout, with full module names, to be changed at will."""
    facts = _facts()
    packages = {name: paths[layout] for name, paths in facts["packages"].items()}
    found = [entry for entry in facts["entries"] if layout in entry.get("layouts", LAYOUTS)]
    for entry in found:
        for key in ("module", "base"):
            if key in entry:
                entry[key] = entry[key].format(**packages)
    return found


def write_double(root: Path, entries: list[Entry], version: str) -> None:
    """Make `root` hold the package `tensorrt_llm`, with the metadata of an installed one, and nothing else.

    What is there already and right is left alone, so that many doubles in turn cost little. An entry of the kind
    "absent" leaves its module and nothing in it.
    """
    write_texts(root, package_texts(root, entries, version))


def package_texts(root: Path, entries: list[Entry], version: str) -> dict[Path, str]:
    """The files of that package."""
    present = {f"{entry['module']}.{entry['name']}" for entry in entries if entry["kind"] != "absent"}
    # TensorRT-LLM greets on stdout.
    sources: dict[str, list[str]] = {"tensorrt_llm": [f"print('[TensorRT-LLM] version: {version}')"]}
    for entry in entries:
        parents = entry["module"].split(".")
        for depth in range(1, len(parents) + 1):
            sources.setdefault(".".join(parents[:depth]), [])
        sources[entry["module"]].append(_source(entry, present))
    metadata = f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n"
    texts = {root / f"tensorrt_llm-{version}.dist-info/METADATA": metadata}
    for name, parts in sources.items():
        path = module_path(root, name)
        if any(other.startswith(f"{name}.") for other in sources):
            path = path.with_suffix("") / "__init__.py"
        texts[path] = "\n".join(["import dataclasses, typing", *parts, ""])
    return texts


def write_texts(root: Path, texts: dict[Path, str]) -> None:
    """Make `root` hold these files and nothing else."""
    for path in [path for path in root.rglob("*") if path.is_file() and path not in texts]:
        path.unlink()
    for path, text in texts.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    # Folders without files would still be namespace packages.
    for folder in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def module_path(root: Path, module: str) -> Path:
    """Where a module without submodules is written."""
    return root.joinpath(*module.split(".")).with_suffix(".py")


def _facts() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "signatures.json").read_text(encoding="utf-8"))


def _source(entry: Entry, present: set[str]) -> str:
    name, kind = entry["name"], entry["kind"]
    if kind == "absent":
        return ""
    if kind == "runtime":
        return entry["source"]
    if kind == "value":
        return f"{name} = {entry['value']}"
    if kind == "function":
        return _function(name, entry["params"], "")
    lines = []
    base = "object"
    if entry.get("base") in present:
        module, _, base = entry["base"].rpartition(".")
        lines.append(f"from {module} import {base}")
    if kind == "fields":
        lines.append("@dataclasses.dataclass(kw_only=True)")
    lines.append(f"class {name}({base}):")
    lines.append(f"    'Double of {name}.'")
    lines += [f"    {attribute} = {value}" for attribute, value in entry.get("attributes", {}).items()]
    for field in entry.get("fields", ()):
        field_name, _, default = field.partition("=")
        lines.append(f"    {field_name}: object" + (f" = {default}" if default else ""))
    lines += [_function(one, ["self"], "    @property\n") for one in entry.get("properties", ())]
    final = dict.fromkeys(entry.get("final", ()), "    @typing.final\n")
    for one, params in entry.get("methods", {}).items():
        lines.append(_function(one, params, final.get(one, "")))
    for one, params in entry.get("classmethods", {}).items():
        lines.append(_function(one, params, "    @classmethod\n" + final.get(one, "")))
    return "\n".join(lines)


def _function(name: str, params: list[str], decorator: str) -> str:
    indent = "    " if decorator or params[:1] == ["self"] else ""
    return f"{decorator}{indent}def {name}({', '.join(params)}):\n{indent}    {_BODY}"
