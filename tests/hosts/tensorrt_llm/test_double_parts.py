"""Parts of the runtime double that no model is needed for: cache views, block accounting, configs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles.tensorrt_llm.install import runtime_double


@pytest.fixture(params=["new", "old"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with runtime_double(tmp_path / "double", request.param):
        yield request.param


def test_offsets_name_the_pages_of_both_managers_views(layout: str) -> None:
    """Row 3 of block b of layer 1, through the pool, through V1's view and through V2's."""
    module = import_module("tensorrt_llm._double.kv_cache")
    options = {
        "num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "tokens_per_block": 4, "max_seq_len": 40,
        "max_batch_size": 2, "dtype": torch.float32,
    }  # fmt: skip
    for kind in ("KVCacheManager", "KVCacheManagerV2"):
        manager = getattr(module, kind)(**options)
        manager.ledger.grow(7, 10)
        offsets = torch.full((1, 2, 2, manager.max_blocks_per_seq), 99, dtype=torch.int32)
        manager.copy_batch_block_offsets(offsets, [7], 1, 0, 1)
        blocks = manager.ledger.blocks[7]
        assert offsets[0, 0, 0, :3].tolist() == [block * 6 for block in blocks]
        assert offsets[0, 0, 1, :3].tolist() == [block * 6 + 1 for block in blocks]
        assert (offsets[0, 0, :, 3:] == -1).all() and (offsets[0, 1] == 99).all()
        hnd, nhd = (manager.get_buffers(1, kv_layout=kv_layout) for kv_layout in ("HND", "NHD"))
        assert hnd.isnan().all(), "fresh blocks are poison"
        page = int(offsets[0, 0, 0, 1]) // (2 if kind.endswith("V2") else 6)
        hnd[page, 1, 0, 3] = torch.arange(8.0)
        pool = manager.pools[0].view(-1, 3, 2, 2, 4, 8)
        assert torch.equal(pool[blocks[1], 1, 1, 0, 3].cpu(), torch.arange(8.0))
        assert nhd.shape[2:] == (4, 2, 8) and hnd.shape[2:] == (2, 4, 8)


def test_a_rewind_gives_back_empty_blocks(layout: str) -> None:
    ledger = import_module("tensorrt_llm._double.kv_blocks").BlockLedger(6, 4)
    assert ledger.grow(1, 5) == [0, 1] and ledger.grow(1, 3) == [] and ledger.grow(1, 1) == [2]
    ledger.rewind(1, 4)
    assert ledger.blocks[1] == [0, 1] and ledger.rows[1] == 5
    ledger.rewind(1, 1)
    assert ledger.blocks[1] == [0] and len(ledger.free) == 5
    ledger.release(1)
    assert len(ledger.free) == 6


def test_configs_are_refused_as_by_the_real_ones(layout: str, tmp_path: Path) -> None:
    module = import_module("tensorrt_llm.llmapi.llm_args")
    tree = {
        "decoding_type": "Eagle3", "speculative_model_dir": str(tmp_path), "max_draft_len": 3, "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 2,
    }  # fmt: skip

    def args(**changes: Any) -> Any:
        return module.TorchLlmArgs(model="m", speculative_config=tree | changes).speculative_config

    assert args().max_total_draft_tokens == 6 and args().tokens_per_gen_step == 7
    assert type(args()) is module.Eagle3DecodingConfig
    for changes in ({"tree_topk": 2}, {"max_total_draft_tokens": 7}, {"max_total_draft_tokens": 2},
                    {"decoding_type": "TreeEagle"}, {"dynamic_tree_max_topK": None}):  # fmt: skip
        with pytest.raises(ValueError):
            args(**changes)

    class Ours(module.Eagle3DecodingConfig):
        pass

    kept = module.TorchLlmArgs(model="m", speculative_config=Ours(**tree)).speculative_config
    assert type(kept) is Ours, "an instance of a subclass passes as it is"
