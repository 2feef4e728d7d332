"""What every test needs: the device, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# Kernels choose the interpreter when they are decorated, so this must precede their import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Workers that each use every core wait for one another, several times over on tiny tensors.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

from tests.builders import tiny_eagle3_dir, tiny_llama_dir

# The same examples every time: a rare one belongs into a test of its own.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, or not this one, and what needs a package that is not installed."""
    has_trtllm = importlib.util.find_spec("tensorrt_llm") is not None
    has_gpu = torch.cuda.is_available()
    has_sm100 = has_gpu and torch.cuda.get_device_capability() in ((10, 0), (10, 3))
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "sm100" in item.keywords and not has_sm100:
            item.add_marker(pytest.mark.skip(reason="needs SM100 or SM103"))
        # Keywords hold folder names too.
        if item.get_closest_marker("tensorrt_llm") and not has_trtllm:
            item.add_marker(pytest.mark.skip(reason="needs the tensorrt_llm package"))


@pytest.fixture(autouse=True)
def _no_test_leaves_variables() -> Iterator[None]:
    """A host sets variables in this process, as TensorRT-LLM does."""
    before = dict(os.environ)
    yield
    # pytest's own comes and goes around every phase of a test.
    before["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernel tests run: the real kernels on a GPU, Triton's interpreter on a CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers with a byte-level tokenizer."""
    # Our kernels serve head_dim 64 and up; on a CPU the smaller model is faster.
    hidden_size = 256 if torch.cuda.is_available() else 64
    return tiny_llama_dir(tmp_path_factory.mktemp("tiny_target"), hidden_size=hidden_size)


@pytest.fixture(scope="session")
def tiny_head(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A random EAGLE3 head for `tiny_target`."""
    return tiny_eagle3_dir(tmp_path_factory.mktemp("tiny_head"), tiny_target)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_target: Path) -> Any:
    """The tokenizer of `tiny_target`: one token a byte, and 41 letter pairs."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target, local_files_only=True)
