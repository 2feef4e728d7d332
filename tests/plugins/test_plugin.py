"""What the plugin does with TLLM_FMHA_LIBS, and the line in which a rank says what it runs."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest

from trtllm_tree.hosts.tensorrt_llm import plugin
from trtllm_tree.hosts.tensorrt_llm.probe import Mismatch, ProbeReport, Resolved
from trtllm_tree.hosts.tensorrt_llm.symbols import SYMBOLS

# The registries of three revisions; "prims_ts" is opt-in in the first.
REGISTRIES = {
    "opt-in": ("triton_custom_mask", "prims_ts", "flashinfer_trtllm_gen", "fallback"),
    "plain": ("triton_custom_mask", "flashinfer_trtllm_gen", "fallback"),
    "first": ("fallback",),
}


class Cascade:
    """Stands for our library."""


class Fallback:
    """Stands for one of TensorRT-LLM's."""


def report_of(libraries: dict[str, Any], defaults: tuple[str, ...]) -> ProbeReport:
    def enabled() -> list[type]:
        return [libraries[name] for name in os.environ["TLLM_FMHA_LIBS"].split(",")]

    values = {
        "FMHA_LIBS": libraries,
        "DEFAULT_FMHA_LIBS": defaults,
        "get_enabled_fmha_lib_classes": enabled,
    }
    found = {symbol.id: symbol for symbol in SYMBOLS if symbol.feature == "fmha"}
    resolved = {("fmha", name): Resolved(found[name], value, name, {}) for name, value in values.items()}
    return ProbeReport("1.4.0rc1", resolved, (Mismatch("a.b.missing", "is missing", ("hybrid",)),))


@pytest.fixture(autouse=True)
def attention(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("trtllm_tree.hosts.tensorrt_llm.attention")
    monkeypatch.setattr(module, "make_fmha_class", lambda: Cascade, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("TLLM_FMHA_LIBS", "TLLM_TREE_ENABLE", "TLLM_TREE_DISABLE"):
        # Registers what is there now to be put back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("revision", "value", "expected"),
    [
        ("opt-in", None, "trtllm_tree,triton_custom_mask,flashinfer_trtllm_gen,fallback"),
        ("opt-in", "+trtllm_tree", "trtllm_tree,triton_custom_mask,flashinfer_trtllm_gen,fallback"),
        ("opt-in", "+trtllm_tree,-triton_custom_mask,+prims_ts", "trtllm_tree,prims_ts,flashinfer_trtllm_gen,fallback"),
        ("plain", "+trtllm_tree", "trtllm_tree,triton_custom_mask,flashinfer_trtllm_gen,fallback"),
        ("plain", "-flashinfer_trtllm_gen,+trtllm_tree", "trtllm_tree,triton_custom_mask,fallback"),
        ("plain", "fallback,trtllm_tree", "trtllm_tree,fallback"),
        ("plain", "fallback", "trtllm_tree,fallback"),
        # Alone it could not run a prefill.
        ("plain", "trtllm_tree", "trtllm_tree,triton_custom_mask,flashinfer_trtllm_gen,fallback"),
        # TensorRT-LLM refuses the name it does not know, and the mixture.
        ("plain", "+trtllm_tree,+prims_ts", "trtllm_tree,triton_custom_mask,flashinfer_trtllm_gen,fallback,prims_ts"),
        ("plain", "fallback,-prims_ts", "trtllm_tree,fallback,-prims_ts"),
        ("first", "+trtllm_tree", "trtllm_tree,fallback"),
    ],
)  # fmt: skip
def test_for_a_tree_our_library_comes_first_and_the_rest_as_asked_for(
    monkeypatch: pytest.MonkeyPatch, revision: str, value: str | None, expected: str
) -> None:
    libraries = dict.fromkeys(REGISTRIES[revision], Fallback)
    defaults = tuple(name for name in libraries if name != "prims_ts")
    if value is not None:
        monkeypatch.setenv("TLLM_FMHA_LIBS", value)
    report = report_of(libraries, defaults)
    for _ in range(2):
        plugin.use_attention(report)
        assert os.environ["TLLM_FMHA_LIBS"] == expected
        assert libraries == dict.fromkeys(REGISTRIES[revision], Fallback) | {"trtllm_tree": Cascade}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("+trtllm_tree", None),
        ("trtllm_tree,fallback", "fallback"),
        ("+trtllm_tree,-prims_ts", "-prims_ts"),
        ("fallback", "fallback"),
    ],
)
def test_without_a_tree_our_library_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: str | None
) -> None:
    if value is not None:
        monkeypatch.setenv("TLLM_FMHA_LIBS", value)
    plugin.use_attention(None)
    assert os.environ.get("TLLM_FMHA_LIBS") == expected


def test_trees_are_on_by_one_word_and_off_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plugin.trees_enabled()
    monkeypatch.setenv("TLLM_TREE_ENABLE", "0")
    assert not plugin.trees_enabled()
    monkeypatch.setenv("TLLM_TREE_ENABLE", "1")
    assert plugin.trees_enabled()
    monkeypatch.setenv("TLLM_TREE_DISABLE", "1")
    assert not plugin.trees_enabled()


def test_a_rank_says_in_one_line_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of({"fallback": Fallback}, ("fallback",))
    plugin.use_attention(report)
    line = plugin.log_line(rank=3, worker=Cascade, verify="gumbel", report=report)
    assert capsys.readouterr().err == f"{line}\n" and "\n" not in line
    for said in (
        "rank 3",
        "worker Cascade",
        "attention Cascade > Fallback",
        "verify gumbel",
        "1.4.0rc1",
        "a.b.missing",
    ):
        assert said in line
