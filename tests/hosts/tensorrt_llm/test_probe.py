"""The probe over contract doubles: both layouts fit, and each thing that does not is one reported mismatch."""

from __future__ import annotations

import sys

import pytest

from tests.doubles.tensorrt_llm import Entry, double_entries, double_version
from tests.hosts.tensorrt_llm.conftest import Install, assert_one_mismatch
from trtllm_tree.hosts.tensorrt_llm.probe import probe
from trtllm_tree.hosts.tensorrt_llm.symbols import FEATURES, SYMBOLS, Symbol
from trtllm_tree.support.report import Supported

FEATURE_IDS = {feature.id for feature in FEATURES}
layouts = pytest.mark.parametrize("layout", ["new", "old"])
# Under the old layout only what moved or was renamed differs.
CASES = [("new", symbol) for symbol in SYMBOLS] + [
    ("old", symbol)
    for symbol in SYMBOLS
    if len(symbol.modules) > 1 or "|" in "".join((symbol.member, *symbol.parameters))
]
each_symbol = pytest.mark.parametrize(
    ("layout", "symbol"), CASES, ids=[f"{layout}-{symbol.feature}-{symbol.id}" for layout, symbol in CASES]
)


def entry_of(entries: list[Entry], symbol: Symbol) -> Entry:
    (entry,) = (one for one in entries if one["name"] == symbol.name and one["module"] in symbol.modules)
    return entry


def functions_of(entry: Entry) -> list[dict[str, list[str]]]:
    return [entry.get(kind, {}) for kind in ("methods", "classmethods")]


def parameters_of(entry: Entry, symbol: Symbol) -> list[str]:
    """The list of parameters or fields in the facts that this symbol is about."""
    if symbol.kind == "fields":
        return entry.get("fields", [])
    if entry["kind"] == "function":
        return entry["params"]
    names = symbol.member.split("|") if symbol.member else ["__init__"]
    found = [table[name] for name in names for table in functions_of(entry) if name in table]
    return found[0]


def features_of(entry: Entry) -> set[str]:
    return {one.feature for one in SYMBOLS if one.name == entry["name"] and entry["module"] in one.modules}


@layouts
def test_a_layout_fits_with_every_symbol_at_its_own_path(install_double: Install, layout: str) -> None:
    install_double(double_entries(layout), layout)
    report = probe()
    assert report.mismatches == () and report.version == double_version(layout)
    assert set(report.resolved) == {(symbol.feature, symbol.id) for symbol in SYMBOLS}
    assert len(report.resolved) == len(SYMBOLS), "two symbols share an id"
    assert all(report.answer(feature) == Supported() for feature in FEATURE_IDS)
    report.require()
    support = report.resolved["fmha", "Fmha._is_supported"]
    args = report.resolved["fmha", "AttentionForwardArgs"]
    worker = report.resolved["worker", "Eagle3OneModelWorker._forward_impl"]
    names = (support.path.rpartition(".")[2], worker.path.rpartition(".")[2])
    if layout == "new":
        assert names == ("_is_supported", "_forward_impl")
        assert args.path == "tensorrt_llm._torch.attention.backends.interface.AttentionForwardArgs"
    else:
        assert names == ("is_supported", "forward")
        assert args.path == "tensorrt_llm._torch.attention_backend.interface.AttentionForwardArgs"
    assert args.value is sys.modules[args.path.rpartition(".")[0]].AttentionForwardArgs


@each_symbol
def test_a_symbol_that_is_gone_is_one_mismatch(install_double: Install, layout: str, symbol: Symbol) -> None:
    entries = double_entries(layout)
    entry = entry_of(entries, symbol)
    if symbol.member:
        for table in functions_of(entry):
            for name in symbol.member.split("|"):
                table.pop(name, None)
        features = {symbol.feature}
        path = f"{entry['module']}.{symbol.id}"
    else:
        entry["kind"] = "absent"
        features = features_of(entry)
        there = [name for name in symbol.modules if any(name == one["module"] for one in entries)]
        path = f"{there[0]}.{symbol.name}"
    install_double(entries, layout)
    assert_one_mismatch(probe(), path, features)


@each_symbol
def test_a_renamed_symbol_is_one_mismatch_that_names_its_like(
    install_double: Install, layout: str, symbol: Symbol
) -> None:
    entries = double_entries(layout)
    entry = entry_of(entries, symbol)
    if symbol.member:
        renamed = symbol.member.partition("|")[0] + "_v9"
        features = {symbol.feature}
        for table in functions_of(entry):
            for name in set(table).intersection(symbol.member.split("|")):
                table[renamed] = table.pop(name)
    else:
        renamed = entry["name"] + "V9"
        features = features_of(entry)
        entry["name"] = renamed
    install_double(entries, layout)
    report = probe()
    assert_one_mismatch(report, report.mismatches[0].path, features)
    assert report.mismatches[0].path.endswith(symbol.id)
    assert renamed in report.mismatches[0].rule.partition("there is ")[2]


@each_symbol
def test_each_renamed_parameter_is_one_mismatch(install_double: Install, layout: str, symbol: Symbol) -> None:
    renamed = 0
    for wanted in symbol.parameters:
        entries = double_entries(layout)
        entry = entry_of(entries, symbol)
        parameters = parameters_of(entry, symbol)
        for index, parameter in enumerate(parameters):
            name, equals, default = parameter.partition("=")
            # Where it may be absent, a call does without it; an override is passed the new one.
            if name in wanted.rstrip("?").split("|") and not (wanted.endswith("?") and symbol.kind == "call"):
                parameters[index] = f"{name}_v9{equals}{default}"
                install_double(entries, layout)
                report = probe()
                assert_one_mismatch(report, report.mismatches[0].path, {symbol.feature})
                assert report.mismatches[0].path.rpartition(".")[2] in (symbol.member or symbol.name).split(
                    "|"
                )
                assert wanted.partition("|")[0].rstrip("?") in report.mismatches[0].rule
                renamed += 1
    optional = sum(wanted.endswith("?") and symbol.kind == "call" for wanted in symbol.parameters)
    # Properties and class attributes of the doubles, and what only LLM's **kwargs take, have no list to rename in.
    others = {
        ("llm_api", "LLM"): 1,
        ("fmha", "TrtllmAttentionMetadata"): 4,
        ("slots", "SpecTreeManager"): 1,
        ("worker", "ResourceManagerType"): 1,
    }
    phase = symbol.id == "Fmha._is_supported" and layout == "old"
    unlisted = others.get((symbol.feature, symbol.id), 0)
    assert renamed == len(symbol.parameters) - optional - unlisted - phase


@each_symbol
def test_a_new_parameter_without_a_default_is_one_mismatch(
    install_double: Install, layout: str, symbol: Symbol
) -> None:
    if symbol.kind in ("fields", "value"):
        return
    entries = double_entries(layout)
    entry = entry_of(entries, symbol)
    parameters_of(entry, symbol).insert(1 if entry["kind"] == "class" else 0, "brand_new")
    install_double(entries, layout)
    report = probe()
    assert "brand_new" in report.mismatches[0].rule or symbol.positional
    assert_one_mismatch(report, report.mismatches[0].path, {symbol.feature})


@layouts
def test_a_module_that_is_gone_costs_the_features_of_its_symbols_only(
    install_double: Install, layout: str
) -> None:
    for module in sorted({entry["module"] for entry in double_entries(layout)} - {"tensorrt_llm"}):
        entries = [entry for entry in double_entries(layout) if entry["module"] != module]
        gone = [entry for entry in double_entries(layout) if entry["module"] == module]
        install_double(entries, layout)
        report = probe()
        found = {feature for mismatch in report.mismatches for feature in mismatch.features}
        assert found == set().union(*map(features_of, gone)), module
        # A symbol that moved may be looked for in another module, which is still there.
        moved = {"KVCacheManagerV2", "MTPEagleWorker"}.intersection(entry["name"] for entry in gone)
        assert len(report.mismatches) <= 1 + len(moved), report.mismatches
