"""A 16-bit model's residual stream and logits stay float32: what keeps windows of different size in agreement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.builders import tiny_deepseek_dir
from trtllm_tree.engine.chain_attention import DecodeAttention
from trtllm_tree.engine.kv_cache import CacheGroup, GroupSpec, KVCache
from trtllm_tree.engine.model_runner import ModelRunner, target_layer_specs
from trtllm_tree.engine.ports import ForwardBatch

ROWS = 40


def _logits(runner: ModelRunner, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits of one request's prompt, in one forward."""
    group = CacheGroup(
        GroupSpec("target", target_layer_specs(runner.config)),
        num_pages=5,
        page_size=16,
        num_slots=2,
        max_pages=4,
        dtype=runner.dtype,
        device=runner.device,
    )
    group.reserve(0, ROWS)
    table, positions = group.page_table[:1], torch.arange(ROWS, device=runner.device)
    slots = table[0, positions // 16] * 16 + (positions % 16).int()
    attention = DecodeAttention(torch.tensor([ROWS], dtype=torch.int32, device=runner.device), ROWS, ROWS)
    batch = ForwardBatch(token_ids, positions, (slots,), (table,), attention)
    return runner.forward(batch, KVCache([group]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_model_carries_its_stream_and_gives_its_logits_in_float32(
    tiny_target: Path, device: str, dtype: torch.dtype
) -> None:
    runner = ModelRunner(tiny_target, dtype=dtype, device=torch.device(device))
    streams = []
    for layer in runner.model.model.layers:
        layer.register_forward_hook(lambda _module, _args, out: streams.append(out))
    torch.manual_seed(0)
    token_ids = torch.randint(3, 250, (ROWS,), device=device)
    logits = _logits(runner, token_ids)
    assert [stream.dtype for stream in streams] == [torch.float32] * len(runner.model.model.layers)
    assert not torch.equal(streams[-1], streams[-1].to(dtype).float()), "the stream was rounded"
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.to(dtype).float()), "the logits were rounded"

    # The same weights in float32 are the truth; transformers' own 16-bit forward is further from it.
    plain = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=dtype).to(device)
    with torch.inference_mode():
        theirs = plain(token_ids[None]).logits[0].float()
        truth = plain.float()(token_ids[None]).logits[0]
    assert (logits - truth).std() < 0.9 * (theirs - truth).std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_can_be_captured_in_bfloat16_only_and_a_dense_model_always(
    tiny_target: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """What torch does about it on a GPU is asked in tests/gpu/test_decode_graphs.py."""

    def is_capturable(model_dir: Path) -> bool:
        return ModelRunner(model_dir, dtype=dtype, device=torch.device("cpu")).is_capturable

    assert is_capturable(tiny_target)
    assert is_capturable(tiny_deepseek_dir(tmp_path)) == (dtype == torch.bfloat16)
