"""Stand-ins for FlashInfer and tokenspeed_mla that compute what those are documented to return, in float64.

Rows that cover no key get NaN and an inviting log-sum-exp. Scratch is left as dirty as a launch that was cut short.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles import attention_paths as oracle

FP8 = torch.float8_e4m3fn
GQA, MLA = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache_mla"
# Parameters of each version, as far as our calls could touch them. Each builds on the one before.
OLD = [
    "query",
    "kv_cache",
    "workspace_buffer",
    "block_tables",
    "seq_lens",
    "max_seq_len",
    "bmm1_scale",
    "bmm2_scale",
]
OLD += ["out", "sinks", "enable_pdl", "backend"]
OLD_GQA = [
    *OLD,
    "window_left",
    "out_dtype",
    "kv_layout",
    "q_len_per_req",
    "mask",
    "max_q_len",
    "cum_seq_lens_q",
]
OLD_MLA = [*OLD, "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim", "sparse_mla_top_k"]
LSE = ["uses_shared_paged_kv_idx", "lse", "return_lse"]
VERSIONS = {
    "0.6.0": {GQA: OLD_GQA, MLA: OLD_MLA},
    "0.6.12": {GQA: OLD_GQA + LSE, MLA: OLD_MLA + LSE},
    "0.6.15": {
        GQA: [*OLD_GQA, *LSE, "multi_ctas_kv_counter_buffer"],
        MLA: [*OLD_MLA, *LSE, "multi_ctas_kv_counter_buffer"],
    },
    "0.7.4": {
        GQA: [*OLD_GQA, *LSE, "multi_ctas_kv_counter_buffer", "sparse_top_k", "cp_world"],
        MLA: [*OLD_MLA, *LSE, "multi_ctas_kv_counter_buffer", "enable_dcp", "return_lse_base"],
    },
}


def with_signature(names: list[str], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, taking exactly these keywords."""

    def call(**given: Any) -> Any:
        assert given.keys() <= set(names), f"unknown: {given.keys() - set(names)}"
        return run(**given)

    kind = inspect.Parameter.KEYWORD_ONLY
    call.__signature__ = inspect.Signature([inspect.Parameter(n, kind, default=None) for n in names])
    call.__qualname__ = "decode"
    return call


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> types.ModuleType:
    """Make `name` an importable module with these members."""
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(__import__("sys").modules, name, module)
    return module


def install_flashinfer(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A `flashinfer` of this version that has the two decode functions only."""
    names = VERSIONS[version]
    install(monkeypatch, "flashinfer", __version__=version)
    gqa = with_signature(names[GQA], trtllm_decode)
    mla = with_signature(names[MLA], trtllm_decode_mla)
    install(monkeypatch, "flashinfer.decode", **{GQA: gqa})
    install(monkeypatch, "flashinfer.mla", **{MLA: mla})


def trtllm_decode(
    *,
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    q_len_per_req: int,
    **other: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The GQA decode of the trtllm-gen backend."""
    check_common(query, kv_cache[0], block_tables, seq_lens, **other)
    assert (other["kv_layout"], other["uses_shared_paged_kv_idx"], bmm2_scale) == ("HND", False, 1.0)
    tokens, heads, dim = query.shape
    batch = len(seq_lens)
    assert tokens == batch * q_len_per_req
    assert block_tables.shape[:2] == (batch, 2)
    assert torch.equal(block_tables[:, 0], block_tables[:, 1])
    q = query.double().view(batch, q_len_per_req, heads, dim)
    partial = causal_partial(q, *kv_cache, block_tables[:, 0], seq_lens, bmm1_scale)
    return write(partial, out, lse)


def trtllm_decode_mla(
    *,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    **other: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The MLA decode; newer versions let its log-sum-exp be asked for in base e."""
    check_common(query, kv_cache, block_tables, seq_lens, **other)
    assert query.shape[3] == kv_cache.shape[3] == kv_lora_rank + qk_rope_head_dim
    assert (kv_lora_rank, other["qk_nope_head_dim"], bmm2_scale) in ((512, 128, 1.0), (256, 64, 1.0))
    assert block_tables.shape[0] == len(query)
    assert block_tables.shape[1] % (128 // kv_cache.shape[2]) == 0
    assert out.dtype == torch.bfloat16
    partial, lse2 = causal_partial(query.double(), kv_cache, kv_cache, block_tables, seq_lens, bmm1_scale)
    base = 1.0 if other.get("return_lse_base", "base2") == "base2" else math.log(2.0)
    return write((partial[..., :kv_lora_rank], lse2 * base), out, lse)


def check_common(
    query: torch.Tensor, cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, **other: Any
) -> None:
    """What the launcher takes for granted or checks."""
    assert (other["backend"], other["return_lse"]) == ("trtllm-gen", True), "the base of the lse hangs on it"
    assert query.dtype == cache.dtype, "mixed dtypes are not grouped"
    assert query.is_contiguous()
    for tensor in (block_tables, seq_lens):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert block_tables.min() >= 0
    assert seq_lens.min() >= 1
    assert other["max_seq_len"] >= int(seq_lens.max())
    counters = other.get("multi_ctas_kv_counter_buffer")
    if counters is None:
        counters = other["workspace_buffer"][: 8 << 20]
    assert len(counters) >= 4 * len(seq_lens) * query.shape[-2]
    assert counters.data_ptr() % 16 == 0
    assert not counters.any(), "counters were not cleared"
    counters.fill_(7)


def causal_partial(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 (out, lse2); NaN and 50 in rows that cover no key."""
    out, lse2 = oracle.prefix_partial(q, k_cache, v_cache, table, lens.tolist(), causal=True, scale=scale)
    return out, lse2.nan_to_num(nan=50.0)


def write(
    partial: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out.copy_(partial[0].reshape(out.shape))
    lse.copy_(partial[1].reshape(lse.shape))
    return out, lse


def tokenspeed_mla_decode(
    *,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    softmax_scale: float,
    causal_mask: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CuTe decode: base 2 already, bfloat16 output under FP8."""
    assert causal_mask
    assert return_lse
    assert query.dtype == kv_cache.dtype
    assert workspace_buffer.dtype == torch.int8
    assert query.shape[3] == kv_lora_rank + qk_rope_head_dim
    assert block_tables.is_contiguous()
    assert block_tables.min() >= 0
    assert max_seq_len >= max(int(seq_lens.max()), 1)
    out, lse2 = causal_partial(query.double(), kv_cache, kv_cache, block_tables, seq_lens, softmax_scale)
    dtype = torch.bfloat16 if query.dtype == FP8 else query.dtype
    return out[..., :kv_lora_rank].to(dtype), lse2.float()


def tokenspeed_signature() -> inspect.Signature:
    """The parameters of the installed tokenspeed_mla_decode, from its source: it cannot be imported without CUDA."""
    spec = importlib.util.find_spec("tokenspeed_mla")
    if spec is None or spec.origin is None:
        pytest.skip("tokenspeed_mla is not installed")
    source = (Path(spec.origin).parent / "mla_decode.py").read_text(encoding="utf-8")
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "tokenspeed_mla_decode"
    )
    required = len(found.args.args) - len(found.args.defaults)
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(argument.arg, kind, default=empty if index < required else None)
        for index, argument in enumerate(found.args.args)
    ]
    for argument in found.args.kwonlyargs:
        parameters.append(inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=None))
    return inspect.Signature(parameters)


class Fa2Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper, planned from host tensors."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert (kv_layout, backend) == ("HND", "fa2")

    def plan(self, **given: Any) -> None:
        indptr, last = given["paged_kv_indptr"], given["paged_kv_last_page_len"]
        for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"):
            assert given[name].dtype == torch.int32, name
        # As FlashInfer counts: all pages but the last are full, and the last page's slots come on top.
        lens = (indptr.diff() - 1).clamp(min=0) * given["page_size"] + last
        assert (lens <= indptr.diff() * given["page_size"]).all(), "keys without a page"
        self.lens, self.planned = lens.tolist(), given
        assert not given["causal"]

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_lse
        plan, (k_cache, v_cache) = self.planned, paged_kv_cache
        assert (q.dtype, k_cache.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        batch = len(self.lens)
        table = torch.zeros(batch, int(plan["paged_kv_indptr"].diff().max()) + 1, dtype=torch.int32)
        for request in range(batch):
            begin, end = plan["paged_kv_indptr"][request : request + 2].tolist()
            table[request, : end - begin] = plan["paged_kv_indices"][begin:end]
        out, lse2 = oracle.prefix_partial(
            q.view(batch, -1, *q.shape[1:]),
            k_cache,
            v_cache,
            table,
            self.lens,
            causal=False,
            scale=plan["sm_scale"],
        )
        return out.to(plan["o_data_type"]).view(q.shape), lse2.nan_to_num(nan=50.0).float().view(q.shape[:2])
