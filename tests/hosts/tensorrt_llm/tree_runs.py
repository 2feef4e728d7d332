"""Trees over the runtime double: an executor whose model is ours, and what the embedded host says to the prompts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import tiny_eagle3_dir, tiny_llama_dir
from tests.doubles.tensorrt_llm.install import runtime_double
from trtllm_tree import LLM, SamplingParams
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.hosts.tensorrt_llm import plugin

# K, S, N within TensorRT-LLM's limits: S <= N - 1 <= K * S.
Sizes = tuple[int, int, int]
MAIN: Sizes = (4, 5, 20)
_OVER_THE_DOUBLE = ("models", "attention")


@contextmanager
def tree_double(
    root: Path, layout: str, monkeypatch: pytest.MonkeyPatch, *, device: str = "cpu", **variables: str
) -> Iterator[None]:
    """The double with our models registered and trees on, on a device; on a CPU, whatever else the machine has."""
    monkeypatch.setenv("TLLM_DOUBLE_DEVICE", device)
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("TLLM_TREE_VERIFY", "TLLM_TREE_DISABLE", "TLLM_FMHA_LIBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TLLM_TREE_ENABLE", "1")
    # Set by us as well, and so to be put back.
    monkeypatch.setenv("TLLM_FMHA_LIBS", "+trtllm_tree")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with runtime_double(root, layout):
        _forget()
        plugin.register(required=True)
        yield
    _forget()


def tree_executor(target: Path, head: Path | None, sizes: Sizes = MAIN, **options: Any) -> Any:
    """The double's executor over a target of ours, warmed up; without a head its MTP layer drafts.

    `separate` gives the drafter a cache of its own.
    """
    topk, steps, nodes = sizes
    args = _double("llm_args")
    common = {
        "max_draft_len": steps,
        "max_total_draft_tokens": nodes - 1,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": topk,
        "use_rejection_sampling": options.pop("use_rejection_sampling", False),
    }
    if head is None:
        config, worker = args.MTPDecodingConfig(**common), "TreeMTPEagleWorker"
    else:
        layers = set(options.pop("layers", (0, 1, 2)))
        config = args.Eagle3DecodingConfig(
            **common, speculative_model=str(head), eagle3_layers_to_capture=layers
        )
        worker = "TreeEagleWorker"
    config._allow_separate_draft_kv_cache = options.pop("separate", False)
    defaults = {"dtype": torch.float32}
    executor = _double("executor").Executor(target, speculative_config=config, **defaults | options)
    assert type(executor.model.spec_worker).__name__ == worker
    executor.warmup()
    return executor


def plain_executor(target: Path, **options: Any) -> Any:
    """The double's executor without speculation."""
    executor = _double("executor").Executor(target, **{"dtype": torch.float32} | options)
    executor.warmup()
    return executor


def sampling_config(**options: Any) -> Any:
    """Of one request, as TensorRT-LLM has it."""
    lists = {name: [value] for name, value in options.items() if value is not None}
    return _double("requests").SamplingConfig(**lists)


def embedded_tokens(
    target: Path,
    head: Path | None,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams] | SamplingParams,
    sizes: Sizes = MAIN,
    **options: Any,
) -> list[list[int]]:
    """What the sister host generates, with the same tree."""
    topk, steps, nodes = sizes
    config = SpeculativeConfig(
        tree_topk=topk,
        num_steps=steps,
        num_nodes=nodes,
        decoding_type="MTP" if head is None else "Eagle3",
        speculative_model=None if head is None else str(head),
        use_rejection_sampling=options.pop("use_rejection_sampling", False),
    )
    defaults = {
        "device": options.pop("device", "cpu"),
        "dtype": "float32",
        "max_seq_len": 256,
        "max_batch_size": len(prompts),
    }
    with LLM(str(target), speculative_config=config, **defaults | options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]


def prompts_of(*lengths: int, vocab: int = 300, seed: int = 7) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def agreeing_pair(root: Path, *, hidden_size: int = 64) -> tuple[Path, Path]:
    """A random target and head that choose among the same few tokens, so that drafts are often accepted.

    Both have 4 heads: with a `hidden_size` of 256 they are of a size that our kernels take.
    """
    target = tiny_llama_dir(root, tie_embeddings=False, hidden_size=hidden_size)
    head = tiny_eagle3_dir(root, target)
    weights = load_file(head / "model.safetensors")
    likely = torch.arange(4) * 20
    ids = likely + weights["d2t"][likely]
    favour_rows(head / "model.safetensors", "lm_head.weight", likely)
    favour_rows(target / "model.safetensors", "lm_head.weight", ids)
    return target, head


def cached_rows(executor: Any, request: Any, count: int) -> torch.Tensor:
    """K and V of a request's first `count` rows in every target layer, [layers, 2, Hkv, count, D]."""
    manager, pages = executor.kv_cache_manager, []
    blocks = manager.ledger.blocks[request.py_request_id]
    for layer in range(executor.model_config.pretrained_config.num_hidden_layers):
        # The pool's own view, whichever manager it is.
        view = _double("kv_cache").KVCacheManager.get_buffers(manager, layer, kv_layout="HND")
        pages.append(torch.cat([view[block] for block in blocks], dim=2)[:, :, :count])
    return torch.stack(pages)


def favour_rows(path: Path, key: str, rows: torch.Tensor) -> None:
    """Make a checkpoint's scores choose among the tokens `rows`, an even number of them."""
    weights = load_file(path)
    kept = weights[key][rows[::2]]
    weights[key] *= 0.1
    # Opposite pairs: one of each is always above the others.
    weights[key][rows] = torch.stack((kept, -kept), dim=1).flatten(0, 1)
    save_file(weights, path, metadata={"format": "pt"})


def _double(module: str) -> Any:
    return importlib.import_module(f"tensorrt_llm._double.{module}")


def _forget() -> None:
    """Drop our modules that stand on the classes of one double."""
    for name in _OVER_THE_DOUBLE:
        sys.modules.pop(f"trtllm_tree.hosts.tensorrt_llm.{name}", None)
