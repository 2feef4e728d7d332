"""The draft side of an EAGLE3 head: its attention over the draft layer's cache."""

from __future__ import annotations

from pathlib import Path

import torch

from trtllm_tree.draft.eagle3_head import Eagle3Head, load_eagle3_head
from trtllm_tree.engine.kv_cache import KVCache, LayerSpec
from trtllm_tree.engine.model_runner import ModelRunner
from trtllm_tree.engine.ports import ForwardBatch
from trtllm_tree.hosts.embedded.draft_model import DraftPlan, DraftSide
from trtllm_tree.hosts.embedded.kv import DRAFT_LAYER
from trtllm_tree.support.model_facts import read_model_facts


def eagle3_plan(head_dir: Path) -> DraftPlan:
    """The plan of the head in `head_dir`, whose config has been checked.

    Its layer is grouped heads that see all of their keys, whatever the target's are.
    """
    facts = read_model_facts(head_dir)
    assert facts is not None, "an unchecked head"
    assert facts.num_heads and facts.num_kv_heads and facts.head_dim, "an unchecked head"

    def load(runner: ModelRunner, max_rows: int) -> tuple[DraftSide, torch.Tensor]:
        head = load_eagle3_head(
            head_dir,
            target_config=runner.config,
            embed_tokens=runner.embed_tokens,
            dtype=runner.dtype,
            device=runner.device,
        )
        return Eagle3Side(head), runner.keep_features(head.aux_layer_ids, max_rows)

    return DraftPlan(facts.num_heads, LayerSpec(facts.num_kv_heads, facts.head_dim), load)


class Eagle3Side:
    """`DraftSide` of a loaded head."""

    graph_safe = True

    def __init__(self, head: Eagle3Head) -> None:
        self._head = head
        self.hidden_size, self.vocab_size = head.hidden_size, head.draft_vocab_size
        self.dtype, self.d2t = next(head.parameters()).dtype, head.d2t

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `DraftSide.fuse`."""
        return self._head.fuse(features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftSide.logits`."""
        return self._head.logits(hidden)

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """See `DraftSide.forward`."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
            k_cache, v_cache = cache.write(DRAFT_LAYER, batch.write_slots[0], k, v)
            return batch.attention.attend(q, k_cache, v_cache, batch.page_tables[0], scale)

        return self._head(batch.token_ids, hidden, batch.positions, attend)
