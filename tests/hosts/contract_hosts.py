"""The hosts of the contract suite: how an LLM of each is opened, and how one looks into it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.tensorrt_llm.tree_runs import tree_double
from trtllm_tree import LLM
from trtllm_tree.config import SpeculativeConfig
from trtllm_tree.hosts.embedded.kv import EmbeddedKVPool
from trtllm_tree.hosts.tensorrt_llm.symbols import FEATURES, SYMBOLS, Symbol
from trtllm_tree.ports import KVPool
from trtllm_tree.round import SpecRound

HOST_NAMES = ("embedded", "tensorrt_llm, new layout", "tensorrt_llm, old layout")
# Our modules that stand on classes of one double.
OVER_THE_DOUBLE = tuple(
    f"trtllm_tree.hosts.tensorrt_llm.{name}" for name in ("models", "attention", "config")
)

Pair = tuple[Path, Path]
# K, S, N.
Sizes = tuple[int, int, int]


class EmbeddedHost:
    """Our own engine."""

    name = "embedded"
    # Whether tokens above temperature 0 are drawn by our sampler without a tree too.
    draws_chains = True
    # Whether a stop token is among the ids of the output.
    shows_stop_tokens = True

    def open(self, pair: Pair, sizes: Sizes | None, **options: Any) -> LLM:
        """An LLM over a target and its head; without sizes it decodes plainly."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return _llm(pair, sizes, {"device": device, "cuda_graphs": False} | options)

    def free_blocks(self, llm: LLM) -> list[int]:
        return [group.allocator.num_free for group in llm.engine.cache.groups]

    def spec_round(self, llm: LLM) -> SpecRound:
        assert llm.spec_round is not None
        return llm.spec_round

    def kv_pool(self, llm: LLM) -> KVPool:
        return EmbeddedKVPool(llm.engine.cache)

    def pages(self, llm: LLM) -> list[int]:
        """Pages of the target's cache that the only running request has, as the regions count them."""
        (row,) = (row for row in llm.engine.cache.groups[0].page_table.tolist() if any(row))
        return [page for page in row if page]


class TensorRtHost:
    """TensorRT-LLM's runtime double, with the KV cache manager of either generation."""

    name = "tensorrt_llm"
    draws_chains = False
    shows_stop_tokens = False

    def __init__(self, *, second_manager: bool) -> None:
        self._cache = {"use_kv_cache_manager_v2": second_manager}

    def open(self, pair: Pair, sizes: Sizes | None, **options: Any) -> LLM:
        # Overlapped, a step more is on its way when the last token is known.
        own = {"host": "tensorrt_llm", "disable_overlap_scheduler": True, "kv_cache_config": self._cache}
        return _llm(pair, sizes, own | options)

    def free_blocks(self, llm: LLM) -> list[int]:
        return [manager.get_num_free_blocks() for manager in llm.remote.llm.executor._kv_managers()]

    def spec_round(self, llm: LLM) -> SpecRound:
        found = llm.remote.llm.executor.model.spec_worker.spec_round
        assert found is not None
        return found

    def kv_pool(self, llm: LLM) -> KVPool:
        return llm.remote.llm.executor.model.spec_worker._parts.pool

    def pages(self, llm: LLM) -> list[int]:
        executor = llm.remote.llm.executor
        assert len(executor._active) == 1
        pool = executor.model.spec_worker._parts.pool
        offsets = executor.kv_cache_manager.host_kv_cache_block_offsets.to(pool.device)
        table = pool.load_tables(offsets, torch.tensor([0], device=pool.device))
        return [page for page in table[0, 0].tolist() if page >= 0]


Host = EmbeddedHost | TensorRtHost


def cached_rows(host: Host, llm: LLM) -> torch.Tensor:
    """Rows of the only running request in the regions of `ports.KVPool`, [regions, Hkv, rows, D]."""
    regions = [region for group in host.kv_pool(llm).group_regions() for region in group]
    pages = host.pages(llm)
    return torch.stack([torch.cat([region[page] for page in pages], dim=1) for region in regions])


@contextmanager
def running_host(name: str, root: Path) -> Iterator[Host]:
    """A host by name; while it lasts, `import tensorrt_llm` finds the double of its layout, or nothing."""
    if name == "embedded":
        yield EmbeddedHost()
        return
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        forget()
        layout = name.split()[1]
        with tree_double(root, layout, patch):
            # `LLM` sets these itself.
            for variable in ("TLLM_TREE_ENABLE", "TLLM_FMHA_LIBS"):
                del os.environ[variable]
            yield TensorRtHost(second_manager=layout == "old")
        forget()
    os.environ.clear()
    os.environ.update(before)


def forget() -> None:
    """Drop our modules that stand on the double's classes, as in a process that has not used them yet."""
    for module in OVER_THE_DOUBLE:
        sys.modules.pop(module, None)


def is_needed(symbol: Symbol) -> bool:
    """Whether a Llama with an Eagle3 tree does not go without it; features may share a class."""
    needs = {need for feature in FEATURES if feature.id == "trees" for need in feature.needs}
    needs |= {"llm_api", "chain", "trees", "model:LlamaForCausalLM"}
    return any(one.feature in needs for one in SYMBOLS if one.id == symbol.id)


def remove(symbol: Symbol, patch: pytest.MonkeyPatch) -> None:
    """Take one symbol out of the double, as if a version had renamed it."""
    for name in symbol.modules:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        owner = getattr(module, symbol.name, None)
        if owner is not None and not symbol.member:
            patch.delattr(module, symbol.name)
        elif owner is not None:
            places = [(kind, one) for kind in owner.__mro__ for one in symbol.member.split("|")]
            for kind, member in places:
                if member in vars(kind):
                    patch.delattr(kind, member)


def config_of(pair: Pair, sizes: Sizes) -> dict[str, Any]:
    """The arguments of a SpeculativeConfig."""
    topk, steps, nodes = sizes
    return {
        "tree_topk": topk,
        "num_steps": steps,
        "num_nodes": nodes,
        "speculative_model": str(pair[1]),
    }


def _llm(pair: Pair, sizes: Sizes | None, options: dict[str, Any]) -> LLM:
    spec = None if sizes is None else SpeculativeConfig(**config_of(pair, sizes))
    defaults = {"speculative_config": spec, "dtype": "float32", "max_seq_len": 256, "max_batch_size": 3}
    return LLM(str(pair[0]), **defaults | options)
