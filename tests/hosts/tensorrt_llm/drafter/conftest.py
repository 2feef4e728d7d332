"""`TreeDrafter` over doubles whose `Drafter` works, a draft model, and what plain decoding generates."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.builders import tiny_llama_dir
from tests.doubles.tensorrt_llm import double_entries, module_path
from tests.hosts.tensorrt_llm.conftest import Install
from tests.hosts.tensorrt_llm.drafter.flow import BASE, DRAFTER, Loop, make_requests

# What the double only names, at work: the newest constructor, and an older one.
BASES = {
    "new": """
class Drafter:
    _needs_padding_kv_extension = False

    def __init__(self, max_draft_len=None, max_total_draft_tokens=None, max_concurrency=None, draft_len_schedule=None):
        self.max_draft_len, self.max_total_draft_tokens = max_draft_len, max_total_draft_tokens
        self._static_max_total_draft_tokens, self.max_concurrency = max_total_draft_tokens, max_concurrency

    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
        raise NotImplementedError

    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests, resource_manager=None):
        for request in scheduled_requests.generation_requests:
            missing = self._static_max_total_draft_tokens - len(request.py_draft_tokens)
            request.py_draft_tokens.extend([0] * missing)
""",
    "1.2.1": """
class Drafter:
    def __init__(self, max_concurrency=None):
        self.max_concurrency = max_concurrency

    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
        raise NotImplementedError
""",
}


@pytest.fixture(params=["new", "1.2.1"])
def drafting(request: pytest.FixtureRequest, install_double: Install) -> Iterator[Any]:
    """The module under test over a double whose `Drafter` works."""
    yield from _drafting(request.param, install_double)


@pytest.fixture
def newest(install_double: Install) -> Iterator[Any]:
    yield from _drafting("new", install_double)


def _drafting(layout: str, install_double: Install) -> Iterator[Any]:
    root = install_double(double_entries(layout), layout)
    path = module_path(root, BASE)
    before = path.read_text(encoding="utf-8")
    path.write_text(BASES[layout], encoding="utf-8")
    sys.modules.pop(DRAFTER, None)
    yield importlib.import_module(DRAFTER)
    sys.modules.pop(DRAFTER, None)
    path.write_text(before, encoding="utf-8")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A draft model that agrees with the target now and then: the target, with noise."""
    folder = tiny_llama_dir(tmp_path_factory.mktemp("draft"))
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> list[list[int]]:
    requests = make_requests()
    Loop(tiny_target).run(requests)
    return [request.output for request in requests]
