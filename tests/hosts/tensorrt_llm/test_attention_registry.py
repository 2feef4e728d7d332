"""Our library in TensorRT-LLM's registry: which calls reach it, in which order, in both layouts of the double."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.doubles.tensorrt_llm.install import runtime_double
from trtllm_tree.hosts.tensorrt_llm.attention import TreeCascadeFmha, make_fmha_class
from trtllm_tree.hosts.tensorrt_llm.probe import probe


@pytest.fixture(params=["new", "old"])
def registry(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type]]:
    monkeypatch.setenv("TLLM_DOUBLE_DEVICE", "cpu")
    monkeypatch.setenv("TRTLLM_FMHA_CACHE_SANITY_CHECK", "1")
    with runtime_double(tmp_path, request.param):
        yield probe().resolved["fmha", "FMHA_LIBS"].value


class Layer:
    """Enough of an attention layer for its manager."""

    layer_idx, num_heads, num_kv_heads, head_dim, q_scaling = 0, 2, 1, 8, 1.0
    is_mla_enable = False
    kv_lora_rank: int | None = None


def manager_of(attn: Any) -> Any:
    return importlib.import_module("tensorrt_llm._double.manager").FmhaManager(attn)


def call(contexts: int, generations: int) -> tuple[Any, ...]:
    args = probe().resolved["fmha", "AttentionForwardArgs"].value(output=torch.zeros(8, 16))
    metadata = SimpleNamespace(
        num_contexts=contexts,
        num_generations=generations,
        num_ctx_tokens=3 * contexts,
        use_spec_decoding=True,
    )
    return torch.zeros(3 * contexts + 2 * generations, 32), None, None, metadata, args


def test_the_class_is_made_once_and_leaves_the_registry_alone(registry):
    before = dict(registry)
    made = make_fmha_class()
    assert made is make_fmha_class() and registry == before
    assert issubclass(made, TreeCascadeFmha) and issubclass(made, probe().resolved["fmha", "Fmha"].value)
    assert (
        made.__module__ == "trtllm_tree.hosts.tensorrt_llm.attention" and made.__name__ == "TreeCascadeFmha"
    )


@pytest.mark.parametrize(
    "order, ours_first", [("trtllm_tree,fallback", True), ("fallback,trtllm_tree", False)]
)
def test_generation_rows_are_ours_where_the_variable_names_us_first(registry, monkeypatch, order, ours_first):
    registry["trtllm_tree"] = make_fmha_class()
    monkeypatch.setenv("TLLM_FMHA_LIBS", order)
    attn = Layer()
    manager = manager_of(attn)
    for contexts, generations, has_tree_rows in ((0, 2, True), (1, 2, True), (2, 0, False)):
        # Remembered choices are made again and compared.
        for _ in range(2):
            chosen = manager.select(attn, *call(contexts, generations))
            assert isinstance(chosen, TreeCascadeFmha) == (ours_first and has_tree_rows), (
                contexts,
                generations,
            )


def test_every_call_of_latent_attention_passes_through_us(registry, monkeypatch):
    registry["trtllm_tree"] = make_fmha_class()
    monkeypatch.setenv("TLLM_FMHA_LIBS", "trtllm_tree,fallback")
    attn = Layer()
    attn.is_mla_enable, attn.kv_lora_rank = True, 8
    manager = manager_of(attn)
    for contexts, generations in ((0, 2), (1, 2), (2, 0)):
        assert isinstance(manager.select(attn, *call(contexts, generations)), TreeCascadeFmha)
