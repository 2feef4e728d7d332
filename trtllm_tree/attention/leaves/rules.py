"""The rules that leaves share, as reasons in words. Must not know any leaf."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from trtllm_tree.attention.base import LeafShape
from trtllm_tree.attention.leaves.fp8 import FP8
from trtllm_tree.support.report import Refused, Supported, TreeSupport

HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32)


def support(reasons: Sequence[str]) -> TreeSupport:
    """One answer for verify and lanes: refused with every reason, or supported if there is none."""
    answer = Refused("; ".join(reasons)) if reasons else Supported()
    return TreeSupport(verify=answer, lanes=answer)


def capability_reasons(
    device: torch.device,
    *,
    needs: str,
    exactly: Container[tuple[int, int]] = (),
    at_least: tuple[int, int] = (0, 0),
) -> list[str]:
    """Why this device cannot run kernels that need one of `exactly`, or `at_least`."""
    if device.type != "cuda":
        return [f"needs {needs}, and this is {device}"]
    found = torch.cuda.get_device_capability(device)
    if found in exactly if exactly else found >= at_least:
        return []
    return [f"needs {needs}, and this GPU has compute capability {found[0]}.{found[1]}"]


def dtype_reasons(shape: LeafShape, dtypes: Sequence[torch.dtype]) -> list[str]:
    """Why queries of `shape.dtype` over a cache of `shape.kv_dtype` cannot be attended."""
    reasons = []
    if shape.dtype not in dtypes:
        reasons.append(f"dtype {_name(shape.dtype)}: must be {_names(dtypes)}")
    unscaled_fp8 = shape.kv_dtype == FP8 and shape.dtype in HALF_DTYPES
    if shape.kv_dtype != shape.dtype and not unscaled_fp8:
        reasons.append(
            f"KV cache dtype {_name(shape.kv_dtype)} under {_name(shape.dtype)}: must be the same, "
            "or float8_e4m3fn (unscaled) under a 16-bit dtype"
        )
    return reasons


def gqa_reasons(
    shape: LeafShape,
    *,
    head_dims: Sequence[int] = (),
    page_sizes: Sequence[int] = (),
    max_head_ratio: int | None = None,
) -> list[str]:
    """Why heads or pages of `shape` cannot be attended; an empty rule allows everything."""
    if shape.value_dim is not None:
        return ["serves no latent (MLA) cache"]
    reasons = page_reasons(shape, page_sizes)
    if shape.num_heads % shape.num_kv_heads:
        reasons.append(f"{shape.num_heads} query heads are no multiple of {shape.num_kv_heads} KV heads")
    elif max_head_ratio is not None and shape.num_heads // shape.num_kv_heads > max_head_ratio:
        ratio = shape.num_heads // shape.num_kv_heads
        reasons.append(f"{ratio} query heads a KV head: at most {max_head_ratio}")
    if head_dims and shape.head_dim not in head_dims:
        reasons.append(f"head_dim {shape.head_dim}: must be one of {_list(head_dims)}")
    return reasons


def mla_reasons(shape: LeafShape, *, dims: Sequence[tuple[int, int]], page_sizes: Sequence[int]) -> list[str]:
    """Why a latent cache of `shape` cannot be attended; `dims` are allowed pairs (Dqk, Dv)."""
    if shape.value_dim is None or shape.num_kv_heads != 1:
        return ["serves latent (MLA) caches only"]
    reasons = page_reasons(shape, page_sizes)
    if (shape.head_dim, shape.value_dim) not in dims:
        allowed = " or ".join(f"({value}, {head - value})" for head, value in dims)
        found = (shape.value_dim, shape.head_dim - shape.value_dim)
        reasons.append(f"(kv_lora_rank, rotary channels) = {found}: must be {allowed}")
    return reasons


def page_reasons(shape: LeafShape, page_sizes: Sequence[int]) -> list[str]:
    """Why pages of this size cannot be read; an empty rule allows every size."""
    if not page_sizes or shape.page_size in page_sizes:
        return []
    return [f"page size {shape.page_size}: must be one of {_list(page_sizes)}"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(_name(dtype) for dtype in dtypes)


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
