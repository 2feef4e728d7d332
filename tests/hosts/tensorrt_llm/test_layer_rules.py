"""Layers that trees cannot run over are named at start-up, all of them, each once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.hosts.tensorrt_llm.attention_runs import Layer
from trtllm_tree.hosts.tensorrt_llm import attention


def named_layer(**changes: Any) -> torch.nn.Module:
    module: Any = torch.nn.Module()
    attn = Layer().attn
    attn.has_fp8_kv_cache = attn.has_fp4_kv_cache = attn.has_nvfp4 = False
    attn.rope_append, attn.kv_lora_rank, attn.qk_rope_head_dim = True, 16, 8
    attn.attention_chunk_size = attn.sparse_params = None
    for name, value in changes.items():
        setattr(module if name in ("sliding_window", "sinks") else attn, name, value)
    module.attn = attn
    return module


@pytest.mark.parametrize(
    "changes, option",
    [
        ({"is_mla_enable": True, "rope_append": False}, "rope_append"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"sinks": torch.zeros(4)}, "attention sinks"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"sparse_params": object()}, "sparse attention"),
        ({"has_fp4_kv_cache": True}, "kv_cache_config.dtype"),
        ({"has_fp8_kv_cache": True, "kv_scale_quant_orig": torch.tensor([0.5])}, "FP8 KV scales"),
        ({"has_nvfp4": True}, "TRTLLM_ENABLE_ATTENTION_NVFP4_OUTPUT"),
        ({"position_embedding_type": SimpleNamespace(name="mrope")}, "position embedding"),
        ({"num_heads": 5, "num_kv_heads": 2}, "attention of 5 query and 2 KV heads"),
    ],
)
def test_a_layer_that_trees_cannot_run_over_is_named_at_start_up(changes, option):
    model = torch.nn.ModuleList([named_layer(), named_layer(**changes), named_layer(**changes)])
    found = attention.attention_problems(
        model, max_batch=4, max_rows=6, device=torch.device("cpu"), dtype=torch.bfloat16
    )
    assert [problem.option for problem in found] == [f"{option} (2 layers)"]
    plain = torch.nn.ModuleList([named_layer(has_fp8_kv_cache=True, kv_scale_quant_orig=torch.ones(1))])
    assert not attention.attention_problems(plain, max_batch=4, max_rows=6, device=torch.device("cpu"))


def test_a_latent_target_is_served_and_a_latent_head_is_named():
    model = torch.nn.Module()
    model.target, model.draft_model = named_layer(is_mla_enable=True), named_layer(is_mla_enable=True)
    found = attention.attention_problems(model, max_batch=4, max_rows=6, device=torch.device("cpu"))
    assert [problem.option for problem in found] == ["draft attention (1 layers)"]
