"""What one worker is built of, over TensorRT-LLM's managers: our round, its pools, its slots, its buffers.

Built on the first warm-up call, when the managers exist, and again where they were replaced: TensorRT-LLM measures
memory with other ones. Must not know how a step lies in its batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.config.host_rules import DEFAULT_VERIFY_MODE, VERIFY_MODES, VERIFY_VARIABLE
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Eagle
from trtllm_tree.errors import ConfigError, Problem
from trtllm_tree.hosts.tensorrt_llm.draft_heads import DraftHead
from trtllm_tree.hosts.tensorrt_llm.draft_model import TrtllmDraftModel
from trtllm_tree.hosts.tensorrt_llm.kv import TrtllmKVPool
from trtllm_tree.hosts.tensorrt_llm.recurrent import (
    RecurrentStates,
    TreeLinks,
    keeps_states,
    layers_with_rows,
)
from trtllm_tree.hosts.tensorrt_llm.slots import UploadedDraws, tree_slot_storage
from trtllm_tree.round import SpecRound, TreeParts
from trtllm_tree.sampling.base import SamplingBackend
from trtllm_tree.sampling.greedy import GreedySampler
from trtllm_tree.sampling.gumbel import GumbelSampler
from trtllm_tree.sampling.rejection import TreeRejectionSampler
from trtllm_tree.tree.spec import TreeSpec


@dataclass(frozen=True, eq=False)
class Managers:
    """TensorRT-LLM's objects that parts are built over. `draft_kv` is None where the head shares the target's cache."""

    kv: Any
    draft_kv: Any
    trees: Any

    def are(self, other: Managers) -> bool:
        """Whether these are the very same objects."""
        return self.kv is other.kv and self.draft_kv is other.draft_kv and self.trees is other.trees


class StepBuffers:
    """Tensors of fixed address for up to `max_batch` requests: how a window is opened, and what a step returns."""

    def __init__(self, config: SpeculativeConfig, max_batch: int, device: torch.device) -> None:
        ints, longs = {"dtype": torch.int32, "device": device}, {"dtype": torch.int64, "device": device}
        nodes = config.num_nodes
        self.max_batch = max_batch
        self.tokens = torch.zeros(max_batch, nodes, **ints)
        self.positions = torch.zeros(max_batch, nodes, **longs)
        self.committed_lens = torch.zeros(max_batch, **ints)
        self.capacity = torch.zeros(max_batch, **ints)
        self.new_tokens = torch.zeros(max_batch, config.num_steps + 1, **ints)
        self.new_lens = torch.zeros(max_batch, **ints)
        self.next_tokens = torch.zeros(max_batch, nodes, **ints)
        self.next_drafts = torch.zeros(max_batch, nodes - 1, **ints)
        self.node_index = torch.arange(nodes, **ints)


@dataclass(frozen=True, eq=False)
class WorkerParts:
    """A worker's parts.

    Attributes:
        storage: our slot storage; it has taken the place of TensorRT-LLM's.
        tree: the tree's parts of `round`.
        pool: the target's cache.
        draft_pool: the head's cache, one group.
        hidden: [max_batch * N, F], target features of the generation rows.
        recurrent: of a target with recurrent layers.
    """

    managers: Managers
    round: SpecRound
    tree: TreeParts
    draws: UploadedDraws
    storage: Any
    pool: TrtllmKVPool
    draft_pool: TrtllmKVPool
    draft_model: TrtllmDraftModel
    hidden: torch.Tensor
    buffers: StepBuffers
    recurrent: RecurrentStates | None

    def serve(self, managers: Managers) -> bool:
        """Whether these parts are still the right ones for `managers`."""
        return self.managers.are(managers) and managers.trees.slot_storage is self.storage


def verify_mode(spec_config: Any, environment: Mapping[str, str] = os.environ) -> str:
    """Which sampling backend verifies.

    Raises:
        ConfigError: the variable holds another word.
    """
    mode = environment.get(VERIFY_VARIABLE, "")
    if not mode:
        rejects = getattr(spec_config, "use_rejection_sampling", False)
        return "rejection" if rejects else DEFAULT_VERIFY_MODE
    if mode not in VERIFY_MODES:
        rule = f"must be one of {', '.join(VERIFY_MODES)}"
        remedy = f"Set {VERIFY_VARIABLE} to {DEFAULT_VERIFY_MODE}."
        raise ConfigError(Problem(VERIFY_VARIABLE, mode, rule, remedy))
    return mode


def build_parts(
    managers: Managers,
    config: SpeculativeConfig,
    *,
    mode: str,
    head: DraftHead,
    features: tuple[int, torch.dtype],
) -> WorkerParts:
    """Size everything for the largest batch, and put our slot storage in its place.

    Args:
        mode: which backend verifies: greedy, gumbel or rejection.
        head: who drafts.
        features: F, and the dtype of the target's features.
    """
    replaced = managers.trees.slot_storage
    device = replaced.all_ids_buf.device
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), (
        "captured before any warm-up"
    )
    storage = replaced if hasattr(replaced, "trees") else tree_slot_storage(type(replaced))(replaced)
    num_slots, batch, nodes = storage.packed_mask.shape[0], int(managers.trees.num_trees), config.num_nodes
    pool, draft_pool = _pools(managers, _cache_layers(head.module), batch, device)
    draft_model = TrtllmDraftModel(head, draft_pool, max_batch=batch, num_nodes=nodes)
    draws = UploadedDraws(num_slots, batch * nodes, device=device, greedy=mode == "greedy")
    hidden = torch.zeros(batch * nodes, features[0], dtype=features[1], device=device)
    tree = TreeParts(TreeSpec(batch, nodes, hidden), storage.trees.next_parents, KVCompactor(pool))
    spec_round = SpecRound(
        config,
        drafter=Eagle(draft_model, config, max_batch=batch, vocab_size=head.draft_vocab_size, device=device),
        sampler=_sampler(mode, draws, batch, nodes, device),
        hidden=hidden,
        num_slots=num_slots,
        tree=tree,
    )
    recurrent = RecurrentStates(managers.kv, batch, nodes, device) if keeps_states(managers.kv) else None
    storage.trees.links = None if recurrent is None else TreeLinks(batch, nodes, device)
    storage.trees.restart(draws)
    managers.trees.slot_storage = storage
    return WorkerParts(
        managers=managers,
        round=spec_round,
        tree=tree,
        draws=draws,
        storage=storage,
        pool=pool,
        draft_pool=draft_pool,
        draft_model=draft_model,
        hidden=hidden,
        buffers=StepBuffers(config, batch, device),
        recurrent=recurrent,
    )


def _pools(
    managers: Managers, draft_layers: set[int], batch: int, device: torch.device
) -> tuple[TrtllmKVPool, TrtllmKVPool]:
    """The target's and the head's."""
    layers = [layer for layer in layers_with_rows(managers.kv) if layer not in draft_layers]
    draft_kv = managers.kv if managers.draft_kv is None else managers.draft_kv
    pool = TrtllmKVPool(managers.kv, layers, max_batch=batch, device=device)
    draft_pool = TrtllmKVPool(draft_kv, sorted(draft_layers), max_batch=batch, device=device)
    assert draft_pool.num_groups == 1, "the head's layers lie in several pools"
    return pool, draft_pool


def _cache_layers(draft_model: Any) -> set[int]:
    """Cache layers of the head, by the attention backends in it: of grouped heads, or of latent rows."""
    backends = (getattr(module, name, None) for module in draft_model.modules() for name in ("attn", "mqa"))
    layers = {getattr(backend, "layer_idx", None) for backend in backends}
    return {layer for layer in layers if layer is not None}


def _sampler(
    mode: str, draws: UploadedDraws, batch: int, nodes: int, device: torch.device
) -> SamplingBackend:
    if mode == "greedy":
        return GreedySampler(batch, nodes, device=device, tree=True)
    backend = TreeRejectionSampler if mode == "rejection" else GumbelSampler
    return backend(draws, batch, nodes, device=device, tree=True)
