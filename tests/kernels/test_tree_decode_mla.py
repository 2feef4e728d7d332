"""tree_decode over a latent cache (MLA): oracle, reference and tree_decode_mla_kernel agree.

The oracle walks one row at a time in float64 over all keys on its path (tests/kernels/test_tree_window_mla.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.test_tree_window_mla import BF16, FP8, FP16, FP32, TOLERANCE, Call, lanes, make_call, tree
from trtllm_tree.kernels.tree_decode import tree_decode, workspace_shape
from trtllm_tree.kernels.tree_decode.mla import LatentTile, launch, plan
from trtllm_tree.kernels.tree_decode.reference import reference

SMALL, WIDE = LatentTile(64, 32, 4, 2), LatentTile(64, 64, 8, 2)


def outputs(call: Call) -> torch.Tensor:
    """NaN in rows of a wider tensor, so that the output's strides matter."""
    shape = call.truth.shape
    wide = torch.full(
        (*shape[:3], shape[3] + 3), math.nan, dtype=call.args[0].dtype, device=call.truth.device
    )
    return wide[..., : shape[3]]


def run_kernel(call: Call, num_splits: int | None = None, tile: LatentTile | None = None) -> torch.Tensor:
    q, latent, _, *rows = call.args[:6]
    splits = num_splits or plan(q, latent, call.truth.shape[3])[1]
    numel = splits * math.prod(call.truth.shape[:3]) * (call.truth.shape[3] + 4)
    workspace = torch.full((numel,), math.nan, device=q.device)
    out, options = outputs(call), {key: call.options[key] for key in ("window", "scale")}
    launch(q, latent, *rows, **options, out=out, workspace=workspace, num_splits=num_splits, tile=tile)
    return out


def run_reference(call: Call) -> torch.Tensor:
    out, options = outputs(call), {key: call.options[key] for key in ("window", "scale")}
    reference(*call.args[:6], **options, fp8_query=False, out=out)
    return out


def check(call: Call, splits: tuple[int | None, ...] = (1, 3, None), tile: LatentTile | None = None) -> None:
    results = {"reference": run_reference(call)}
    results |= {f"{n} splits": run_kernel(call, n, tile) for n in splits}
    for name, out in results.items():
        error = (out.double() - call.truth).abs().max().item()
        assert error <= TOLERANCE[out.dtype], f"{name}: off by {error}"


def tree_call(
    device: str, num_nodes: int, prefix_lens: list[int], kind: str = "random", **kwargs: Any
) -> Call:
    """A verify window: R = W = N."""
    visible = [tree(kind, num_nodes, seed) for seed, _ in enumerate(prefix_lens)]
    return make_call(device, prefix_lens, visible, num_nodes, causal=False, **kwargs)


@pytest.mark.parametrize("num_nodes", [1, 5, 32, 64, 65, 130])
@pytest.mark.parametrize(("page_size", "tile"), [(16, SMALL), (64, SMALL), (64, WIDE)])
def test_every_row_sees_its_prefix_and_its_ancestors(device, num_nodes, page_size, tile):
    lens = [0, 1, num_nodes - 1, page_size, 2 * page_size - 1, 131][: 6 if num_nodes < 64 else 2]
    check(tree_call(device, num_nodes, lens, page_size=page_size), (1, 3), tile=tile)


@pytest.mark.parametrize("kind", ["chain", "star"])
def test_chains_and_stars_are_trees(device, kind):
    check(tree_call(device, 17, [3, 70], kind), tile=SMALL)


@pytest.mark.parametrize(("num_rows", "window"), [(1, 1), (1, 100), (4, 33), (5, 12), (8, 65)])
def test_lanes_see_any_columns_or_none(device, num_rows, window):
    visible = [lanes(num_rows, window, seed) for seed in range(3)]
    call = make_call(device, [0, 3, 40], visible, window, causal=False)
    # Without a prefix, a lane that sees nothing gives 0.
    assert num_rows == 1 or not call.truth[0, -1].any()
    check(call)


@pytest.mark.parametrize(
    ("dims", "num_heads"), [((512, 64), 16), ((40, 8), 128), ((32, 0), 1), ((64, 3), 20)]
)
def test_every_head_count_and_split_of_a_latent_row_is_right(device, dims, num_heads):
    dtype = BF16 if dims[0] == 512 else FP32
    check(tree_call(device, 3, [2, 50], dims=dims, num_heads=num_heads, dtype=dtype))


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8)])
def test_low_precision_inputs_are_accumulated_in_float32(device, dtype, cache_dtype):
    check(tree_call(device, 9, [3, 100], num_heads=4, dims=(128, 64), dtype=dtype, cache_dtype=cache_dtype))


def test_positions_without_a_page_are_read_from_the_dummy_page(device):
    check(tree_call(device, 20, [30, 31], missing_pages=1))


def test_bits_beyond_the_window_are_ignored(device):
    for num_nodes in (12, 40):
        call = tree_call(device, num_nodes, [5])
        call.args[5].bitwise_or_(-1 << num_nodes)
        check(call)


def test_two_runs_give_the_same_bits(device):
    call = tree_call(device, 20, [5, 170], dtype=BF16)
    assert torch.equal(run_kernel(call), run_kernel(call))


def test_the_op_allocates_what_it_needs_and_runs_the_latent_kernel(device, monkeypatch):
    call = tree_call(device, 6, [7, 200])
    options = {"window": 6, "scale": call.options["scale"], "value_dim": 40}
    assert torch.equal(tree_decode(*call.args[:6], **options), run_reference(call)) or device == "cuda"
    monkeypatch.setenv("TLLM_TREE_KERNELS", "triton")
    out = tree_decode(*call.args[:6], **options)
    assert out.shape == call.truth.shape
    assert torch.equal(out, run_kernel(call))
    splits, num_rows, width = workspace_shape(call.args[0], call.args[1], 40)
    assert (num_rows, width) == (2 * 6 * 3, 44)
    assert splits > 1


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"value_dim": None}, "belongs to a latent cache"),
        ({"value_dim": 49}, "value channels"),
        ({"fp8_query": True}, "fp8_query needs"),
    ],
)
def test_calls_that_make_no_sense_are_refused(device, change, rule):
    call = tree_call(device, 4, [2])
    options = {"window": 4, "scale": 1.0, "value_dim": 40} | change
    with pytest.raises(AssertionError, match=rule):
        tree_decode(*call.args[:6], **options)
