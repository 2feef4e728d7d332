"""Invariant I6: a node's recurrent state follows its parent's, in TensorRT-LLM's own Mamba2 layers.

They read a tree as two links a node, its first child and its next sibling, from the step's speculation metadata, and
keep the state behind every node; the cache manager makes the one behind the accepted leaf the request's. Here parents
become links, and the accepted path a leaf. Must not know how a state is computed, nor how a manager keeps it.
"""

from __future__ import annotations

from typing import Any

import torch

from trtllm_tree.sampling.base import Accepted
from trtllm_tree.tree.verify_batch import TreeVerifyBatch

NONE = -1


class TreeLinks:
    """First children and next siblings of the trees of up to `max_batch` requests, at fixed addresses.

    Args:
        num_nodes: N.
    """

    def __init__(self, max_batch: int, num_nodes: int, device: torch.device) -> None:
        ints = {"dtype": torch.int32, "device": device}
        self._first_child = torch.full((max_batch, num_nodes), NONE, **ints)
        self._next_sibling = torch.full((max_batch, num_nodes), NONE, **ints)
        self._node = torch.arange(num_nodes, **ints)
        # Row i, column j: j stands behind i.
        self._is_behind = self._node > self._node.unsqueeze(1)

    def of(self, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The links of parents int32 [B, N], int32 [B, N] each, `NONE` where there is no such node.

        The next call overwrites them. Never waits for the device.
        """
        size = parents.shape[0]
        first_child, next_sibling = self._first_child[:size], self._next_sibling[:size]
        self._first(parents.unsqueeze(1) == self._node.unsqueeze(1), first_child)
        self._first((parents.unsqueeze(1) == parents.unsqueeze(2)) & self._is_behind, next_sibling)
        return first_child, next_sibling

    def _first(self, candidates: torch.Tensor, out: torch.Tensor) -> None:
        """The lowest node of each row of candidates [B, N, N] into int32 [B, N]."""
        none = self._node.shape[0]
        found = torch.where(candidates, self._node, none).amin(dim=2)
        out.copy_(found.masked_fill_(found == none, NONE))


class RecurrentStates:
    """What one worker says to the recurrent layers of its target.

    Args:
        manager: TensorRT-LLM's cache manager of the target, which has `update_mamba_states`.
        max_batch: largest number of generation requests.
        num_nodes: N.
    """

    def __init__(self, manager: Any, max_batch: int, num_nodes: int, device: torch.device) -> None:
        self._manager = manager
        self._links = TreeLinks(max_batch, num_nodes, device)

    def open(self, spec_metadata: Any, tree: TreeVerifyBatch | None) -> None:
        """Publish the links of the trees that the target's forward verifies, a chain where a slot has no tree.

        TensorRT-LLM asks the slot storage for them on the host, before a step. That may be a step in which the storage
        is replaced, and a graph keeps its tensors for good; what is published here is made inside of the graph.
        """
        assert tree is not None, "recurrent states of a chain are TensorRT-LLM's own"
        links = self._links.of(tree.parents)
        spec_metadata.retrieve_next_token, spec_metadata.retrieve_next_sibling = links

    def close(self, attn_metadata: Any, accepted: Accepted, kept_lens: torch.Tensor) -> None:
        """Make the states behind the accepted leaves those of the requests.

        Args:
            accepted: of the B generation requests.
            kept_lens: int32 [prompts + B], rows that each request of the step keeps; 1 of a prompt.
        """
        assert accepted.path is not None, "a tree was verified without a path"
        last = kept_lens[attn_metadata.num_contexts :].long().unsqueeze(1) - 1
        self._manager.update_mamba_states(
            attn_metadata=attn_metadata,
            num_accepted_tokens=kept_lens,
            state_indices=attn_metadata.mamba_metadata.state_indices,
            accepted_leaf_positions=accepted.path.gather(1, last).squeeze(1).long(),
        )


def keeps_states(manager: Any) -> bool:
    """Whether a cache manager keeps recurrent states beside keys and values."""
    return hasattr(manager, "update_mamba_states")


def layers_with_rows(manager: Any) -> list[int]:
    """The layers that a cache manager keeps keys and values of; a hybrid's others have no KV heads."""
    heads = manager.num_kv_heads_per_layer if keeps_states(manager) else None
    return [
        layer for layer, offset in manager.layer_offsets.items() if heads is None or int(heads[offset]) > 0
    ]
