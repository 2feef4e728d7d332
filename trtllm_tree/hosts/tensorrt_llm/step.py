"""`TreeStep`: what the attention of one forward is told, as an attribute of TensorRT-LLM's attention metadata.

Attention decides between verify trees, draft lanes and chains by this object alone, never by shapes, and it finds
all of it here: rows, positions, pages, and the pool they are pages of. Whoever runs a forward publishes the step and
takes it back. Must not know who computed it, nor how it is attended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from trtllm_tree.attention.cascade import TreeCascadeRows
from trtllm_tree.errors import HostError
from trtllm_tree.hosts.tensorrt_llm.kv import TrtllmKVPool

STEP_ATTRIBUTE = "trtllm_tree_step"


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeStep:
    """The generation rows of one forward: R rows of each of B requests.

    Attributes:
        mode: verify: the N nodes of a tree. lanes: the K lanes of a draft step. chain: consecutive rows, each of
            which sees the ones before it.
        pool: the KV cache of the layers that will attend.
        rows: what each row sees.
        positions: int64 [B, R], of the rotary embedding.
        write_slots: int32 [G, B, R], where the K and V of each row go, by group of the pool; < 0 for nowhere.
        page_tables: int32 [G, B, max_pages]; < 0 for no page.
        attended: the layers that have attended it.
    """

    mode: Literal["verify", "lanes", "chain"]
    pool: TrtllmKVPool
    rows: TreeCascadeRows
    positions: torch.Tensor
    write_slots: torch.Tensor
    page_tables: torch.Tensor
    attended: set[int] = field(default_factory=set, init=False, repr=False)

    def require_attended(self) -> None:
        """Check, behind the forward, that every layer of the pool attended the step, and none went elsewhere.

        Raises:
            HostError: some did not; their rows were attended as a chain's, or not at all.
        """
        if others := sorted(set(self.pool.layers) - self.attended):
            raise HostError(
                f"attention layers {others} did not attend the rows of a tree through trtllm_tree: it must be the "
                "first of TLLM_FMHA_LIBS, and attn_backend TRTLLM"
            )


def publish(metadata: Any, step: TreeStep | None) -> None:
    """Make `step` what the generation rows of `metadata` are; None leaves them to TensorRT-LLM.

    Two places of TensorRT-LLM rotate before attention is asked: modules with unfused RoPE, which set the positions of
    generation rows by a dynamic tree's offsets where these are kept in one row, and the op in front of latent
    attention, which takes positions by generation row (meant for context parallelism). Both are told the step's.
    """
    last = published(metadata)
    if last is not None and last.pool.is_latent:
        metadata.helix_position_offsets = None
    setattr(metadata, STEP_ATTRIBUTE, step)
    if step is None:
        return
    if step.pool.is_latent:
        metadata.helix_position_offsets = step.positions.int().flatten()
    offsets = getattr(metadata, "spec_decoding_position_offsets", None)
    if offsets is None or offsets.dim() != 1:
        return
    batch, num_rows = step.positions.shape
    first = metadata.num_contexts
    past = metadata.kv_lens_cuda[first : first + batch].unsqueeze(1) - num_rows
    offsets[: batch * num_rows].view(batch, num_rows).copy_(step.positions - past)


@contextmanager
def without_row_positions(metadata: Any) -> Iterator[None]:
    """Hide what `publish` told the op behind latent attention: context rows would read it as theirs."""
    step = published(metadata)
    if step is None or not step.pool.is_latent:
        yield
        return
    told, metadata.helix_position_offsets = metadata.helix_position_offsets, None
    try:
        yield
    finally:
        metadata.helix_position_offsets = told


def published(metadata: Any) -> TreeStep | None:
    """The step that was published last."""
    return getattr(metadata, STEP_ATTRIBUTE, None)
