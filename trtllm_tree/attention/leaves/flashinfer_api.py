"""FlashInfer's entry points over its versions: the one file that knows how they differ, told by signature.

Each function finds one entry point, binds the exact call that a leaf makes, and gives an object that makes it, or a
`Refused`. FlashInfer is imported by the first question, never by importing this file. What differs:

* trtllm-gen decode returns a log-sum-exp from 0.6.12 on (GQA and MLA); always base 2 for this backend.
* The counters of multi-CTA KV are the workspace's first 8 MiB, or, where a parameter for them exists (seen in 0.6.15),
  a buffer of their own.
* MLA takes `return_lse_base` (seen in 0.7.4); without it the base follows the backend, so the backend is named.
* Older MLA wants page tables whose width is a multiple of 128 keys; newer ones do not mind it.

Read in the sources of 0.6.0, 0.6.12, 0.6.15, 0.6.18.post1 and 0.7.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_tree.attention.leaves.external_call import find, parameters, refusal
from trtllm_tree.support.leaf_rules import FLASHINFER
from trtllm_tree.support.report import Refused

_PACKAGE, _REMEDY = FLASHINFER.name, FLASHINFER.remedy
_BACKEND = "trtllm-gen"
_COUNTERS = "multi_ctas_kv_counter_buffer"
_LSE_BASE = "return_lse_base"


@dataclass(frozen=True)
class TrtllmDecode:
    """A trtllm-gen decode that can be called with log-sum-exp.

    Attributes:
        function: FlashInfer's.
        constants: arguments that no call changes.
        own_counters: the multi-CTA counters are an argument, not the head of the workspace.
    """

    function: Callable[..., Any]
    constants: dict[str, Any]
    own_counters: bool

    def __call__(self, *, counters: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse2) of one call; `counters` is used where the function takes it."""
        if self.own_counters:
            arguments[_COUNTERS] = counters
        return self.function(**arguments, **self.constants)


_COMMON_ARGUMENTS = (
    "query",
    "kv_cache",
    "workspace_buffer",
    "block_tables",
    "seq_lens",
    "max_seq_len",
    "bmm1_scale",
    "bmm2_scale",
    "out",
    "lse",
)


def trtllm_decode() -> TrtllmDecode | Refused:
    """GQA: query [B * R, Hq, D], kv_cache a pair [num_pages, Hkv, page, D], block_tables [B, 2, pages]."""
    constants = {
        "backend": _BACKEND,
        "kv_layout": "HND",
        "uses_shared_paged_kv_idx": False,
        "return_lse": True,
    }
    name = "trtllm_batch_decode_with_kv_cache"
    return _decode("flashinfer.decode", name, (*_COMMON_ARGUMENTS, "q_len_per_req"), constants)


def trtllm_decode_mla() -> TrtllmDecode | Refused:
    """MLA: query [B, R, Hq, Dqk], kv_cache [num_pages, 1, page, Dqk], block_tables [B, pages], lse [B * R, Hq]."""
    constants = {"backend": _BACKEND, "return_lse": True}
    name = "trtllm_batch_decode_with_kv_cache_mla"
    dims = ("qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim")
    return _decode("flashinfer.mla", name, (*_COMMON_ARGUMENTS, *dims), constants)


def _decode(
    module: str, name: str, arguments: tuple[str, ...], constants: dict[str, Any]
) -> TrtllmDecode | Refused:
    function = find(_PACKAGE, module, name, _REMEDY)
    if isinstance(function, Refused):
        return function
    known = parameters(function)
    if _LSE_BASE in known:
        constants = {**constants, _LSE_BASE: "base2"}
    own_counters = _COUNTERS in known
    optional = (_COUNTERS,) if own_counters else ()
    refused = refusal(_PACKAGE, function, (*arguments, *constants, *optional), _REMEDY)
    return refused or TrtllmDecode(function, constants, own_counters)


@dataclass(frozen=True)
class PagedPrefill:
    """FA2 attention of R rows a request over a paged cache, planned on the host. Its log-sum-exp is base 2."""

    wrapper: Callable[..., Any]

    def make(self, workspace: torch.Tensor) -> Any:
        """A wrapper with `plan` and `run` over this workspace."""
        return self.wrapper(float_workspace_buffer=workspace, **_PREFILL_INIT)


_PREFILL_INIT = {"kv_layout": "HND", "backend": "fa2"}
_PREFILL_PLAN = (
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim_qk",
    "page_size",
    "causal",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
)
_PREFILL_RUN = ("q", "paged_kv_cache", "return_lse")


def paged_prefill() -> PagedPrefill | Refused:
    """The FA2 paged prefill wrapper."""
    wrapper = find(_PACKAGE, "flashinfer.prefill", "BatchPrefillWithPagedKVCacheWrapper", _REMEDY)
    if isinstance(wrapper, Refused):
        return wrapper
    methods: Any = wrapper
    calls: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
        (wrapper, ("float_workspace_buffer", *_PREFILL_INIT)),
        (methods.plan, ("self", *_PREFILL_PLAN)),
        (methods.run, ("self", *_PREFILL_RUN)),
    ]
    for function, arguments in calls:
        if refused := refusal(_PACKAGE, function, arguments, _REMEDY):
            return refused
    return PagedPrefill(wrapper)
