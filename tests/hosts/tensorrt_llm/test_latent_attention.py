"""`TreeCascadeFmha` over latent rows, which TensorRT-LLM's op has rotated and stored before attention is called."""

from __future__ import annotations

import math

import pytest
import torch

from tests.hosts.tensorrt_llm.attention_runs import (
    BLOCKS,
    FP8,
    LAYER,
    PARENTS,
    PREFIX,
    Args,
    InputType,
    Layer,
    Other,
    metadata,
    verify_step,
)
from tests.hosts.tensorrt_llm.pools import FakeManager, row_of
from trtllm_tree.hosts.tensorrt_llm.kv import TrtllmKVPool
from trtllm_tree.hosts.tensorrt_llm.step import publish


class LatentLayer(Layer):
    """A layer over latent rows, which TensorRT-LLM's op has rotated and stored before attention is called."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank, self.rope = 16, 8
        width = self.rank + self.rope
        self.manager = FakeManager(
            [(1, width)] * 3, num_blocks=10, generation=self.generation, dtype=self.kv_dtype, kv_factor=1
        )
        self.pool = TrtllmKVPool(self.manager, [0, 1, 2], max_batch=4, device="cpu")
        for name, value in {
            "is_mla_enable": True, "kv_lora_rank": self.rank, "qk_rope_head_dim": self.rope, "qk_nope_head_dim": 12,
            "has_fp8_kv_cache": self.kv_dtype == FP8, "num_kv_heads": 1,
        }.items():  # fmt: skip
            setattr(self.attn, name, value)
        for block in range(10):
            for b, blocks in enumerate(BLOCKS):
                if block in blocks:
                    for position in range(PREFIX[b] + len(PARENTS[0])):
                        if blocks[position // self.page] == block:
                            row = row_of(self.manager, LAYER, blocks, position, 0)
                            row.copy_(self.as_cached(torch.randn(1, width)))


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_queries_over_latent_rows_attend_their_ancestors(generation, kv_dtype):
    layer = LatentLayer(
        generation=generation, dtype=torch.bfloat16 if kv_dtype == FP8 else kv_dtype, kv_dtype=kv_dtype
    )
    (step, seen), nodes, width = verify_step(layer), len(PARENTS[0]), layer.rank + layer.rope
    q = torch.randn(3 * nodes, layer.heads * width).to(layer.dtype)
    rounded = q.to(FP8)
    data, stored = metadata(), [memory.clone() for memory in layer.manager.memory]
    publish(data, step)
    assert torch.equal(data.helix_position_offsets, step.positions.int().flatten())
    output = torch.empty(3 * nodes, layer.heads * layer.rank, dtype=layer.dtype)
    args = Args(output=output, attention_input_type=InputType.generation_only)
    if kv_dtype == FP8:
        args.quant_q_buffer = rounded.view(torch.uint8).view(3 * nodes, layer.heads, width)
    layer.fmha.forward(torch.full_like(q, float("nan")) if kv_dtype == FP8 else q, None, None, data, args)

    queries = (rounded if kv_dtype == FP8 else q).double().view(3, nodes, layer.heads, width)
    scale = 1 / (math.sqrt(12 + layer.rope) * layer.q_scaling)
    tolerance = 4e-2 if kv_dtype == FP8 else 1e-4
    for b in range(3):
        for node in range(nodes):
            keys = [*range(PREFIX[b]), *(PREFIX[b] + column for column in seen[b][node])]
            rows = torch.stack([row_of(layer.manager, LAYER, BLOCKS[b], key, 0)[0].double() for key in keys])
            wanted = (queries[b, node] @ rows.T * scale).softmax(-1) @ rows[:, : layer.rank]
            got = output[b * nodes + node].double().view(layer.heads, layer.rank)
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    for now, then in zip(layer.manager.memory, stored, strict=True):
        assert torch.equal(now.float().nan_to_num(9.0), then.float().nan_to_num(9.0)), (
            "rows are not ours to store"
        )
    publish(data, None)
    assert data.helix_position_offsets is None


def test_latent_context_rows_do_not_see_the_positions_of_generation_rows():
    class Context(Other):
        def forward(self, q, k, v, metadata, forward_args):
            assert metadata.helix_position_offsets is None
            super().forward(q, k, v, metadata, forward_args)

    layer = LatentLayer(libraries=[Context])
    step, _ = verify_step(layer)
    data = metadata(contexts=1, context_rows=2)
    data.kv_lens_cuda = torch.zeros(4, dtype=torch.int32)
    publish(data, step)
    args = Args(output=torch.zeros(2, 8), attention_input_type=InputType.context_only)
    layer.fmha.forward(torch.zeros(2, 8), None, None, data, args)
    assert (args.output == 3.0).all() and data.helix_position_offsets is not None
