"""A contract double as the installed TensorRT-LLM, and what one mismatch looks like in a report."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.doubles.tensorrt_llm import Entry, double_version, write_double
from tests.hosts.tensorrt_llm.tree_runs import tree_double
from trtllm_tree.errors import UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.probe import ProbeReport
from trtllm_tree.support.report import Refused

Install = Callable[[list[Entry], str], Path]


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]


@pytest.fixture(scope="session")
def double_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all doubles of a session are written, one after the other."""
    return tmp_path_factory.mktemp("trtllm_double")


@pytest.fixture
def install_double(double_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Writes a double of these entries with a layout's version, to be the one that is imported. Can be repeated."""
    for name in _loaded():
        monkeypatch.delitem(sys.modules, name)
    # A file that was rewritten in the same moment has the same time stamp.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(double_root)

    def install(entries: list[Entry], layout: str) -> Path:
        write_double(double_root, entries, double_version(layout))
        for name in _loaded():
            del sys.modules[name]
        importlib.invalidate_caches()
        return double_root

    yield install
    for name in _loaded():
        del sys.modules[name]


@pytest.fixture(params=["new", "old"])
def layout(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The runtime double with draft trees on, in either layout."""
    with tree_double(tmp_path / "double", request.param, monkeypatch):
        yield request.param


@pytest.fixture
def new_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tree_double(tmp_path / "double", "new", monkeypatch):
        yield


def assert_one_mismatch(report: ProbeReport, path: str, features: set[str]) -> None:
    assert [found.path for found in report.mismatches] == [path], report.mismatches
    assert set(report.mismatches[0].features) == features
    (problem,) = report.problems()
    assert problem.option == path and problem.value == report.version
    with pytest.raises(UnsupportedError) as caught:
        report.require()
    assert caught.value.problems == (problem,)
    for feature in features:
        answer = report.answer(feature)
        assert isinstance(answer, Refused) and path in answer.reason
