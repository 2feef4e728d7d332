"""Which rows of a call are ours, where the others go, and what a call may ask for."""

from __future__ import annotations

import pytest
import torch

from tests.hosts.tensorrt_llm.attention_runs import (
    FP8,
    PREFIX,
    Args,
    InputType,
    Layer,
    Other,
    metadata,
    verify_step,
)
from trtllm_tree.errors import UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.step import publish


def test_context_rows_of_a_mixed_batch_go_to_the_next_library_and_no_other_row_does():
    layer = Layer()
    layer.fill_prefix(PREFIX)
    step, seen = verify_step(layer)
    qkv, context_rows = layer.qkv(5 + 18), 5
    wanted = layer.expected(qkv[context_rows:], step, seen, [list(range(6))] * 3)
    data = metadata(contexts=2, context_rows=context_rows)
    publish(data, step)
    out = layer.run(qkv, data)
    assert (out[:context_rows] == 3.0).all()
    torch.testing.assert_close(out[context_rows:].double(), wanted, rtol=1e-4, atol=1e-4)
    ((kind, rows),) = Other.calls
    assert kind == InputType.context_only and torch.equal(rows, qkv[:context_rows])


class ContextOnly(Other):
    phases = (1,)


class GenerationOnly(Other):
    phases = (2,)


def test_without_a_step_the_whole_call_goes_to_the_first_library_that_takes_it():
    layer = Layer(libraries=[ContextOnly, Other])
    qkv, data = layer.qkv(7), metadata(contexts=1, context_rows=4)
    assert (layer.run(qkv, data) == 3.0).all()
    ((kind, rows),) = Other.calls
    assert kind == InputType.mixed and torch.equal(rows, qkv)
    assert layer.manager.memory[0].isnan().all()


def test_without_a_step_a_mixed_call_that_no_library_takes_is_split():
    layer = Layer(libraries=[GenerationOnly, ContextOnly])
    ContextOnly.calls.clear()
    qkv = layer.qkv(7)
    assert (layer.run(qkv, metadata(contexts=1, context_rows=4)) == 3.0).all()
    assert [(kind, len(rows)) for kind, rows in Other.calls] == [(1, 4), (2, 3)]
    with pytest.raises(UnsupportedError, match="no library behind it"):
        Layer(libraries=[]).run(qkv, metadata())


def test_support_depends_on_nothing_that_a_remembered_choice_forgets():
    layer = Layer()
    q, args = layer.qkv(3), Args(output=None)
    for generations, kind, expected in (
        (3, 0, True),
        (3, 2, True),
        (3, 1, False),
        (0, 0, False),
        (0, 1, False),
    ):
        data, args.attention_input_type = metadata(generations=generations), InputType(kind)
        for step in (None, object()):
            data.trtllm_tree_step = step
            for is_tree in (False, True):
                data.use_spec_decoding = data.is_spec_dec_tree = is_tree
                assert layer.fmha.is_supported(q, None, None, data, args) is expected
                assert layer.fmha.is_supported(q, None, None, data, args, phase="context") is False
    # Context rows of latent attention pass through us, because of what they must not see.
    layer.attn.is_mla_enable = True
    assert layer.fmha.is_supported(q, None, None, metadata(generations=0), args, phase="context")


@pytest.mark.parametrize("scale", [None, torch.tensor([0.25])])
def test_fp8_output_is_quantised_by_the_scale_that_came_with_the_call(scale):
    layer = Layer(dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    layer.fill_prefix(PREFIX)
    step, _ = verify_step(layer)
    qkv, data = layer.qkv(18), metadata()
    publish(data, step)
    plain = layer.run(qkv, data).float()
    quantised = layer.run(qkv, data, dtype=FP8, out_scale=scale)
    assert torch.equal(quantised.float(), (plain * (1.0 if scale is None else scale)).to(FP8).float())


def test_what_a_call_asks_for_and_start_up_could_not_see_is_refused_together():
    layer = Layer()
    step, _ = verify_step(layer)
    data = metadata()
    publish(data, step)
    with pytest.raises(UnsupportedError) as caught:
        layer.run(layer.qkv(18), data, attention_window_size=16, attention_sinks=torch.zeros(4))
    assert [problem.option for problem in caught.value.problems] == [
        "attention_window_size",
        "attention_sinks",
    ]
    layer.fill_prefix(PREFIX)
    layer.run(layer.qkv(18), data, attention_window_size=24)


def test_publishing_a_step_tells_modules_that_rotate_outside_its_positions():
    layer = Layer()
    step, _ = verify_step(layer)
    data = metadata(contexts=1, context_rows=3)
    data.kv_lens_cuda = torch.tensor([3, *(p + 6 for p in PREFIX)], dtype=torch.int32)
    data.spec_decoding_position_offsets = torch.full((40,), -9, dtype=torch.int32)
    publish(data, step)
    # What the module computes: kv_len - rows + offset.
    offsets = data.spec_decoding_position_offsets[:18].view(3, 6)
    assert torch.equal((data.kv_lens_cuda[1:] - 6).unsqueeze(1) + offsets, step.positions)
    assert (data.spec_decoding_position_offsets[18:] == -9).all()
    publish(data, None)
    assert data.trtllm_tree_step is None and torch.equal(
        data.spec_decoding_position_offsets[:18].view(3, 6), offsets
    )
