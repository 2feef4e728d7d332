"""`TreeCascadeFmha`: the generation rows of a published `TreeStep` through our tree attention, all else passed on.

It is an entry of TensorRT-LLM's registry of attention libraries, one object a layer. It supports every call with
generation rows, whatever they are: TensorRT-LLM remembers choices by sizes, so ours must not depend on what only a
step tells. In its own `forward` the rows of a step are attended here, and everything else is handed to the next
library in TensorRT-LLM's order as if this one did not exist: context rows of a mixed batch, and calls without a step.

The base class is the registry's, not the one that splits by phase: older libraries behind this one know no phases,
and a mixed batch would go to them whole, tree rows included. Must not know who published the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from trtllm_tree.attention.base import LeafShape
from trtllm_tree.attention.cascade import TreeCascade
from trtllm_tree.errors import Problem, UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.layer_rules import (
    CHAIN_REMEDY,
    attention_layers,
    layer_problems,
    rotary_style,
)
from trtllm_tree.hosts.tensorrt_llm.leaf import choose_leaf
from trtllm_tree.hosts.tensorrt_llm.probe import probe
from trtllm_tree.hosts.tensorrt_llm.step import TreeStep, published, without_row_positions
from trtllm_tree.kernels.rotate_append import rotate_append

FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max
# Values of TensorRT-LLM's AttentionInputType.
_CONTEXT_ONLY, _GENERATION_ONLY = 1, 2
# TensorRT-LLM's default; a pool's own is known when it is there.
_PAGE_SIZE = 32


def make_fmha_class() -> type:
    """The class for the registry, over the installed TensorRT-LLM's base. Changes nothing of it; can be repeated.

    Raises:
        HostUnavailableError: TensorRT-LLM is not installed.
        UnsupportedError: its attention libraries are not as ours needs them.
    """
    report = probe()
    report.require("fmha")
    symbols = {name: report.resolved["fmha", name] for name in ("Fmha", "get_enabled_fmha_lib_classes")}
    hooks = [report.resolved["fmha", f"Fmha.{name}"].path for name in ("_is_available", "_is_supported")]
    available, supported = (path.rpartition(".")[2] for path in hooks)
    return _fmha_class(
        symbols["Fmha"].value, symbols["get_enabled_fmha_lib_classes"].value, available, supported
    )


@cache
def _fmha_class(base: type, enabled: Callable[[], list[type]], available: str, supported: str) -> type:
    def is_available(cls: type, attn: Any = None) -> bool:
        return attn is not None

    body = {
        "__doc__": TreeCascadeFmha.__doc__,
        "__module__": __name__,
        "enabled_libraries": staticmethod(enabled),
        # An approximation of latent attention that a layer may ask for; exact attention is within it.
        "supports_skip_correction": True,
        available: classmethod(is_available),
        supported: TreeCascadeFmha.serves,
    }
    return type("TreeCascadeFmha", (TreeCascadeFmha, base), body)


class TreeCascadeFmha:
    """Tree attention for the generation rows of one attention layer; the rest goes to the libraries behind it."""

    attn: Any
    enabled_libraries: Callable[[], list[Any]]

    def __init__(self, attn: Any) -> None:
        super().__init__(attn)  # type: ignore[call-arg]
        self._behind: list[Any] | None = None
        self._cascades: dict[tuple[torch.dtype, torch.dtype, int], TreeCascade] = {}

    def serves(self, q: Any, k: Any, v: Any, metadata: Any, forward_args: Any, *, phase: Any = None) -> bool:
        """Whether there are generation rows in this call, or in this phase of it; of latent attention, every call."""
        if self.attn.is_mla_enable:
            return True
        if phase is not None and getattr(phase, "value", phase) == "context":
            return False
        return _has_generations(metadata, forward_args)

    def forward(self, q: Any, k: Any, v: Any, metadata: Any, forward_args: Any) -> None:
        """Attend the step's rows, and hand on the rest. Arguments are TensorRT-LLM's."""
        step, kind = published(metadata), int(forward_args.attention_input_type)
        if step is None or not _has_generations(metadata, forward_args):
            with without_row_positions(metadata):
                self._hand_on(q, k, v, metadata, forward_args)
            return
        split = 0 if kind == _GENERATION_ONLY else metadata.num_ctx_tokens
        if split:
            self._hand_on(*_rows(slice(0, split), _CONTEXT_ONLY, q, k, v, metadata, forward_args))
        self._attend(step, *_rows(slice(split, None), _GENERATION_ONLY, q, k, v, metadata, forward_args))

    def _attend(self, step: TreeStep, q: Any, k: Any, v: Any, metadata: Any, forward_args: Any) -> None:
        """The rows of a step."""
        attn = self.attn
        _refuse_options(metadata, forward_args)
        batch, num_rows = step.positions.shape
        assert q.shape[0] == batch * num_rows, f"{q.shape[0]} rows came for a step of {batch} x {num_rows}"
        k_cache, v_cache = step.pool.views(attn.layer_idx)
        group = step.pool.group_of(attn.layer_idx)
        if attn.is_mla_enable:
            # TensorRT-LLM has rotated the queries and the rows, and has stored these at kv_len - R + row.
            assert step.mode == "verify", "latent rows are stored as a verify window"
            q, channels = (
                _latent_queries(attn, q, forward_args),
                attn.qk_nope_head_dim + attn.qk_rope_head_dim,
            )
        else:
            q, channels = self._store(step, group, *_heads(attn, q, k, v)), attn.head_dim
        out = self._cascade(q, k_cache, metadata.max_num_requests).attend(
            q.view(batch, num_rows, *q.shape[1:]),
            k_cache,
            v_cache,
            step.page_tables[group],
            step.rows,
            1.0 / (math.sqrt(channels) * attn.q_scaling),
        )
        _give(out, forward_args)
        step.attended.add(attn.layer_idx)

    def _store(self, step: TreeStep, group: int, q: Any, k: Any, v: Any) -> torch.Tensor:
        """Put K and V of the rows where the step says; returns the queries, rotated where the layer rotates itself."""
        k_cache, v_cache = step.pool.views(self.attn.layer_idx)
        assert v_cache is not None, "grouped heads came to latent rows"
        slots, positions = step.write_slots[group].reshape(-1), step.positions.reshape(-1)
        return rotate_append(q, k, v, k_cache, v_cache, slots, positions=positions, **_rotation(self.attn))

    def _cascade(self, q: torch.Tensor, k_cache: torch.Tensor, max_batch: int) -> TreeCascade:
        key = (q.dtype, k_cache.dtype, k_cache.shape[2])
        if key not in self._cascades:
            shape = _leaf_shape(self.attn, *key, max_batch=max_batch)
            self._cascades[key] = TreeCascade(choose_leaf(q.device, shape))
        return self._cascades[key]

    def _hand_on(self, q: Any, k: Any, v: Any, metadata: Any, forward_args: Any) -> None:
        """Let the first library behind this one that supports the call run it; else one for each phase."""
        if self._behind is None:
            others = [one for one in self.enabled_libraries() if not isinstance(self, one)]
            self._behind = [one(self.attn) for one in others if one.is_available(self.attn)]
        for library in self._behind:
            if library.is_supported(q, k, v, metadata, forward_args):
                library.forward(q, k, v, metadata, forward_args)
                return
        split = metadata.num_ctx_tokens
        is_mixed = not int(forward_args.attention_input_type) and 0 < split < q.shape[0]
        if not is_mixed:
            raise UnsupportedError(
                Problem("TLLM_FMHA_LIBS", "trtllm_tree", "no library behind it takes this call", CHAIN_REMEDY)
            )
        self._hand_on(*_rows(slice(0, split), _CONTEXT_ONLY, q, k, v, metadata, forward_args))
        self._hand_on(*_rows(slice(split, None), _GENERATION_ONLY, q, k, v, metadata, forward_args))


def attention_problems(
    model: torch.nn.Module,
    *,
    max_batch: int,
    max_rows: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = _PAGE_SIZE,
) -> list[Problem]:
    """Everything about the attention layers of a model, its draft model's included, that trees cannot run over.

    Args:
        max_batch: largest number of requests.
        max_rows: largest number of rows of a request.
        device: where they will run.
        dtype: of queries.
        page_size: tokens of a KV block.
    """
    found: Counter[Problem] = Counter()
    draft = getattr(model, "draft_model", None)
    drafts = set() if draft is None else {id(attn) for _, attn in attention_layers(draft)}
    for module, attn in attention_layers(model):
        problems = layer_problems(module, attn, drafts=id(attn) in drafts)
        if not problems:
            kv_dtype = FP8 if attn.has_fp8_kv_cache else dtype
            shape = _leaf_shape(attn, dtype, kv_dtype, page_size, max_batch=max_batch, max_rows=max_rows)
            try:
                choose_leaf(device, shape)
            except UnsupportedError as refused:
                problems = list(refused.problems)
        found.update(problems)
    return [replace(problem, option=f"{problem.option} ({count} layers)") for problem, count in found.items()]


def _leaf_shape(
    attn: Any,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    *,
    max_batch: int,
    max_rows: int = 64,
) -> LeafShape:
    rank = attn.kv_lora_rank if attn.is_mla_enable else None
    return LeafShape(
        num_heads=attn.num_heads,
        num_kv_heads=attn.num_kv_heads if rank is None else 1,
        head_dim=attn.head_dim if rank is None else rank + attn.qk_rope_head_dim,
        value_dim=rank,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_batch=max_batch,
        max_rows=max(max_rows, 64),
    )


def _rows(
    rows: slice, kind: int, q: Any, k: Any, v: Any, metadata: Any, forward_args: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """The call on some of its rows, all of one phase."""
    args = replace(
        forward_args,
        attention_input_type=type(forward_args.attention_input_type)(kind),
        output=forward_args.output[rows],
    )
    return q[rows], None if k is None else k[rows], None if v is None else v[rows], metadata, args


def _heads(attn: Any, q: Any, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, heads, D] of queries, keys and values, which may come fused."""
    if k is None:
        fused = q.unflatten(-1, (-1, attn.head_dim))
        heads = [attn.num_heads, attn.num_kv_heads, attn.num_kv_heads]
        assert fused.shape[1] == sum(heads), "rows came without keys"
        return fused.split(heads, dim=1)
    q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in (q, k, v))
    return q, k, v


def _latent_queries(attn: Any, q: torch.Tensor, forward_args: Any) -> torch.Tensor:
    """Absorbed queries [T, Hq, rank + rotary channels]; those of an FP8 cache come rounded to it, in a buffer."""
    shape = (q.shape[0], attn.num_heads, attn.kv_lora_rank + attn.qk_rope_head_dim)
    if not attn.has_fp8_kv_cache:
        return q.reshape(shape)
    rounded = forward_args.quant_q_buffer.view(torch.uint8).flatten()[: math.prod(shape)]
    return rounded.view(FP8).view(shape).to(q.dtype)


def _has_generations(metadata: Any, forward_args: Any) -> bool:
    return metadata.num_generations > 0 and int(forward_args.attention_input_type) != _CONTEXT_ONLY


def _rotation(attn: Any) -> dict[str, Any]:
    """The layer's own rotation, as `rotate_append` takes it."""
    interleaved = rotary_style(attn)
    if interleaved is None:
        return {}
    table = attn.rotary_cos_sin.view(-1, attn.rope_params.dim // 2, 2)
    return {"cos_sin": table, "interleaved": interleaved}


def _give(out: torch.Tensor, forward_args: Any) -> None:
    """Put attention's output [B, R, Hq, D] where TensorRT-LLM wants it, quantised if it asks for that."""
    output, scale = forward_args.output, forward_args.out_scale
    out = out.reshape(output.shape)
    if output.dtype == FP8:
        out = out.float() if scale is None else out.float() * scale
        out = out.clamp(-_FP8_MAX, _FP8_MAX)
    output.copy_(out)


def _refuse_options(metadata: Any, forward_args: Any) -> None:
    """Name what this call asks for and start-up could not see."""
    window = forward_args.attention_window_size
    asked = (
        ("attention_window_size", window, window is not None and window < metadata.max_seq_len),
        ("attention_sinks", "given", forward_args.attention_sinks is not None),
        ("attention_mask_data", "given", forward_args.attention_mask_data is not None),
        ("attention output", "NVFP4", forward_args.output.dtype == torch.uint8),
    )
    problems = [
        Problem(option, value, "tree attention cannot honour it", CHAIN_REMEDY)
        for option, value, is_asked in asked
        if is_asked
    ]
    if problems:
        raise UnsupportedError(problems)
