"""The engine's KV cache as the core sees it: a target pool to compact, and the draft layer's group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_tree.engine.kv_cache import CacheGroup, GroupSpec, KVCache, LayerSpec
from trtllm_tree.engine.model_runner import cache_layer

TARGET_GROUP = "target"
DRAFT_GROUP = "draft"
DRAFT_LAYER = cache_layer(DRAFT_GROUP, 0)


class EmbeddedKVPool:
    """`ports.KVPool` over every group but the draft's: lane rows are never committed, so they never move."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def group_regions(self) -> Sequence[Sequence[torch.Tensor]]:
        """See `ports.KVPool.group_regions`."""
        return [group.regions() for group in self._cache.groups if group.name != DRAFT_GROUP]


def build_cache(
    target_layers: dict[str, LayerSpec],
    draft_layer: LayerSpec | None,
    *,
    num_tokens: int,
    page_size: int,
    max_batch_size: int,
    max_extent: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """The engine's cache: one group for the target, one for the draft layer if there is one.

    Args:
        num_tokens: KV rows of every group.
        max_extent: most KV rows of one request, verify windows included.
    """
    specs = [GroupSpec(TARGET_GROUP, target_layers)]
    if draft_layer is not None:
        specs.append(GroupSpec(DRAFT_GROUP, {DRAFT_LAYER: draft_layer}))
    return KVCache(
        [
            CacheGroup(
                spec,
                num_pages=-(-num_tokens // page_size) + 1,
                page_size=page_size,
                num_slots=max_batch_size + 1,
                max_pages=-(-max_extent // page_size),
                dtype=dtype,
                device=device,
            )
            for spec in specs
        ]
    )
