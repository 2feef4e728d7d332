"""Baselines of tree attention from FlashInfer, which is imported only when one is built.

A plan is made once, outside the timed calls: a runtime makes one per step for all layers. The mask that FA2 takes
is built there too. Shapes as in attention.py; an exception here is shown as the reason for a missing number.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trtllm_tree.bench.ops.entry import Call

if TYPE_CHECKING:
    from trtllm_tree.bench.ops.attention import AttentionInputs

_WORKSPACE_BYTES = 512 * 2**20


def _module(name: str) -> Any:
    return importlib.import_module(f"flashinfer.{name}")


def _workspace(inputs: AttentionInputs) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.table.device)


def _pages(inputs: AttentionInputs, kv_len: int) -> dict[str, torch.Tensor]:
    """The page table in FlashInfer's ragged form, cut at `kv_len` keys."""
    batch, page, device = inputs.case["B"], inputs.case["page"], inputs.table.device
    used = -(-kv_len // page)
    ints = {"dtype": torch.int32, "device": device}
    return {
        "indptr": torch.arange(batch + 1, **ints) * used,
        "indices": inputs.table[:, :used].contiguous().flatten(),
        "last_page_len": torch.full((batch,), kv_len - (used - 1) * page, **ints),
    }


def _flat_rows(inputs: AttentionInputs, num_rows: int) -> list[torch.Tensor]:
    """The first rows of each set's queries as [B * num_rows, Hq, D]."""
    return [q[:, :num_rows].reshape(-1, *q.shape[2:]).contiguous() for q in inputs.q]


def _prefill(inputs: AttentionInputs, kv_len: int, **plan: Any) -> Any:
    """A planned FA2 prefill wrapper for N rows a request over `kv_len` keys."""
    case, pages = inputs.case, _pages(inputs, kv_len)
    wrapper = _module("prefill").BatchPrefillWithPagedKVCacheWrapper(
        _workspace(inputs), kv_layout="HND", backend="fa2"
    )
    wrapper.plan(
        qo_indptr=torch.arange(case["B"] + 1, dtype=torch.int32, device=inputs.table.device) * case["N"],
        paged_kv_indptr=pages["indptr"],
        paged_kv_indices=pages["indices"],
        paged_kv_last_page_len=pages["last_page_len"],
        num_qo_heads=case["Hq"],
        num_kv_heads=case["Hkv"],
        head_dim_qk=case["D"],
        page_size=case["page"],
        sm_scale=inputs.scale,
        q_data_type=torch.bfloat16,
        kv_data_type=case.torch_dtype,
        **plan,
    )
    return wrapper


def fa2_causal(inputs: AttentionInputs) -> list[Call]:
    """N causal rows over the P prefix keys, with their log-sum-exp: a cascade's prefix half alone."""
    wrapper = _prefill(inputs, inputs.case["P"], causal=True)

    def call_on(q: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor]) -> Call:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
        return lambda: wrapper.run(q, pool, out=out, lse=lse, return_lse=True)

    rows = _flat_rows(inputs, inputs.case["N"])
    return [call_on(q, pool) for q, pool in zip(rows, inputs.pools, strict=True)]


def visible_keys(mask: torch.Tensor, prefix: int) -> torch.Tensor:
    """bool [B, N, P + N]: which keys each row sees, from ancestor masks int64 [B, N, words]."""
    nodes = mask.shape[1]
    index = torch.arange(nodes, device=mask.device)
    window = (mask[:, :, index // 64] >> (index % 64)) & 1
    return torch.nn.functional.pad(window.bool(), (prefix, 0), value=True)


def fa2_custom_mask(inputs: AttentionInputs) -> list[Call]:
    """N rows over all P + N keys with a bit per row and key."""
    case = inputs.case
    kv_len = case["P"] + case["N"]
    wrapper = _prefill(inputs, kv_len, custom_mask=visible_keys(inputs.mask, case["P"]).flatten())

    def call_on(q: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor]) -> Call:
        out = torch.empty_like(q)
        return lambda: wrapper.run(q, pool, out=out)

    rows = _flat_rows(inputs, case["N"])
    return [call_on(q, pool) for q, pool in zip(rows, inputs.pools, strict=True)]


def xqa_mask(mask: torch.Tensor) -> torch.Tensor:
    """XQA's form of ancestor masks int64 [B, N, words]: 16-bit words [B, N, 2 * ceil(N / 32)]."""
    halves = mask.contiguous().view(torch.int16)
    return halves[:, :, : 2 * -(-mask.shape[1] // 32)].contiguous().view(torch.uint16)


def _xqa(inputs: AttentionInputs, num_rows: int, kv_len: int, mask: torch.Tensor | None) -> list[Call]:
    case, workspace = inputs.case, _workspace(inputs)
    decode = _module("decode").xqa_batch_decode_with_kv_cache
    lens = torch.full((case["B"],), kv_len, dtype=torch.int32, device=workspace.device).view(torch.uint32)

    def call_on(q: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor]) -> Call:
        shape = (case["B"], num_rows, *q.shape[1:]) if num_rows > 1 else tuple(q.shape)
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
        return lambda: decode(
            query=q,
            kv_cache=pool,
            workspace_buffer=workspace,
            block_tables=inputs.table,
            seq_lens=lens,
            max_seq_len=kv_len,
            bmm1_scale=inputs.scale,
            out=out,
            kv_layout="HND",
            q_len_per_req=num_rows,
            mask=mask,
        )

    return [call_on(q, pool) for q, pool in zip(_flat_rows(inputs, num_rows), inputs.pools, strict=True)]


def xqa_tree(inputs: AttentionInputs) -> list[Call]:
    """N rows over all P + N keys, the last N of them masked."""
    case = inputs.case
    return _xqa(inputs, case["N"], case["P"] + case["N"], xqa_mask(inputs.mask))


def xqa_one_row(inputs: AttentionInputs) -> list[Call]:
    """A plain decode of one row over the P prefix keys."""
    return _xqa(inputs, 1, inputs.case["P"], None)


def fa2_one_row(inputs: AttentionInputs) -> list[Call]:
    """A plain decode of one row over the P prefix keys, on the matrix unit."""
    case, pages = inputs.case, _pages(inputs, inputs.case["P"])
    wrapper = _module("decode").BatchDecodeWithPagedKVCacheWrapper(
        _workspace(inputs), kv_layout="HND", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        **pages,
        num_qo_heads=case["Hq"],
        num_kv_heads=case["Hkv"],
        head_dim=case["D"],
        page_size=case["page"],
        sm_scale=inputs.scale,
        q_data_type=torch.bfloat16,
        kv_data_type=case.torch_dtype,
    )

    def call_on(q: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor]) -> Call:
        out = torch.empty_like(q)
        return lambda: wrapper.run(q, pool, out=out)

    return [call_on(q, pool) for q, pool in zip(_flat_rows(inputs, 1), inputs.pools, strict=True)]


# Name -> (builder, whether it computes what `tree_decode` does).
BASELINES: dict[str, tuple[Callable[[AttentionInputs], list[Call]], bool]] = {
    "FA2 causal + LSE, prefix only": (fa2_causal, False),
    "FA2 custom mask": (fa2_custom_mask, True),
    "XQA tree mask": (xqa_tree, True),
    "q_len=1 FA2": (fa2_one_row, False),
    "q_len=1 XQA": (xqa_one_row, False),
}
