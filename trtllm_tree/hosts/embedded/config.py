"""From the user's config to numbers: device, dtype, limits and pool sizes of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_tree.config.engine import EngineConfig, kv_cache_dtype_problems
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.errors import ConfigError, Problem
from trtllm_tree.kernels.dispatch import use_triton
from trtllm_tree.support.head import head_problems
from trtllm_tree.support.kv_scales import kv_scale_problems
from trtllm_tree.support.leaf_rules import FP8_CAPABILITY
from trtllm_tree.support.model_facts import read_model_facts
from trtllm_tree.support.mtp import mtp_problems
from trtllm_tree.support.mtp_weights import mtp_weight_problems
from trtllm_tree.tree.reservation import request_extent

# Pool for this many tokens a request unless the user says otherwise: full contexts of every request would not
# fit a small machine.
_DEFAULT_TOKENS_PER_REQUEST = 2048
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class ResolvedConfig:
    """What the engine is built with.

    Attributes:
        window_len: rows a request contributes to a decode forward.
        max_extent: most KV rows of one request.
        kv_dtype: of the K/V pools, target's and draft's.
        num_kv_tokens: KV rows of every cache group.
        cuda_graphs: decode steps are to be captured, if all of them can be.
    """

    target_dir: Path
    head_dir: Path | None
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    page_size: int
    window_len: int
    max_extent: int
    num_kv_tokens: int
    cuda_graphs: bool


def resolve_config(
    config: EngineConfig,
    speculative: SpeculativeConfig | None,
    *,
    target_dir: Path,
    head_dir: Path | None,
    model_config: Any,
) -> ResolvedConfig:
    """Fill in what the user left to us.

    Raises:
        ConfigError: a device that is not there, limits that the model or the pool cannot hold, K/V that cannot be
            kept as asked for, a drafter that does not fit the target.
    """
    problems: list[Problem] = []
    device = _device(config.device, problems)
    model_limit = int(model_config.max_position_embeddings)
    max_seq_len = config.max_seq_len or model_limit
    if max_seq_len > model_limit:
        rule = f"the model's positions end at {model_limit}"
        problems.append(
            Problem("max_seq_len", max_seq_len, rule, f"Set max_seq_len to at most {model_limit}.")
        )
    window_len = speculative.num_nodes if speculative is not None else 1
    max_extent = request_extent(window_len, max_seq_len)
    num_kv_tokens = config.kv_cache_tokens or max(
        max_extent, config.max_batch_size * min(max_extent, _DEFAULT_TOKENS_PER_REQUEST)
    )
    dtype = _dtype(config.dtype, device, model_config)
    kv_dtype = _kv_dtype(config.kv_cache_dtype, dtype, device, problems)
    problems += _drafter_problems(speculative, target_dir, head_dir)
    if kv_dtype == FP8:
        problems += kv_scale_problems(target_dir)
        problems += kv_scale_problems(head_dir, "speculative_model") if head_dir is not None else []
    if problems:
        raise ConfigError(problems)
    return ResolvedConfig(
        target_dir=target_dir,
        head_dir=head_dir,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=max_seq_len,
        page_size=config.tokens_per_block,
        window_len=window_len,
        max_extent=max_extent,
        num_kv_tokens=num_kv_tokens,
        cuda_graphs=config.cuda_graphs and device.type == "cuda",
    )


def _drafter_problems(
    speculative: SpeculativeConfig | None, target_dir: Path, head_dir: Path | None
) -> list[Problem]:
    """Why the head, or the target's own MTP layer, cannot draft."""
    if head_dir is not None:
        return head_problems(head_dir, target_dir)
    facts = read_model_facts(target_dir)
    if speculative is None or speculative.decoding_type != "MTP" or facts is None:
        return []
    return mtp_problems(facts, "embedded") + mtp_weight_problems(target_dir, facts)


def _device(name: str, problems: list[Problem]) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        problems.append(Problem("device", name, "torch sees no CUDA device", "Use device='cpu' or 'auto'."))
        return torch.device("cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _dtype(name: str, device: torch.device, model_config: Any) -> torch.dtype:
    """`auto` is the checkpoint's dtype on a GPU; on a CPU it is float32, where 16-bit types are slow."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    dtype = getattr(model_config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _kv_dtype(name: str, dtype: torch.dtype, device: torch.device, problems: list[Problem]) -> torch.dtype:
    """`auto` is the model's dtype. The torch reference reads FP8 under every dtype and on every device."""
    problems += kv_cache_dtype_problems(name, "kv_cache_dtype")
    if name != "fp8":
        return dtype
    if use_triton(torch.empty(0, device=device)):
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        problems += fp8_kernel_problems(dtype, capability)
    return FP8


def fp8_kernel_problems(dtype: torch.dtype, capability: tuple[int, int] | None) -> list[Problem]:
    """Why our kernels cannot read an FP8 cache: they widen it to 16 bits, and Triton knows E4M3 from SM89 on.

    Args:
        dtype: of queries.
        capability: of the GPU; None where kernels are interpreted.
    """
    rules = []
    if dtype == torch.float32:
        rules.append(
            ("the kernels read an FP8 cache under a 16-bit dtype, and dtype is float32", "dtype to bfloat16")
        )
    if capability is not None and capability < FP8_CAPABILITY:
        found = f"this GPU has {capability[0]}.{capability[1]}"
        rules.append((f"E4M3 needs compute capability 8.9, and {found}", "device to cpu"))
    return [
        Problem("kv_cache_dtype", "fp8", rule, f"Set kv_cache_dtype to auto, or {other}.")
        for rule, other in rules
    ]
