"""`rotate_append` against complex numbers and a loop over rows, as torch reference and as Triton kernel."""

from __future__ import annotations

import pytest
import torch

from trtllm_tree.kernels.rotate_append import rotate_append
from trtllm_tree.kernels.rotate_append.reference import reference
from trtllm_tree.kernels.rotate_append.triton import launch

FP8 = torch.float8_e4m3fn


def turned(row: torch.Tensor, position: int, width: int, interleaved: bool) -> torch.Tensor:
    """Row [H, D] as complex numbers times exp(i * angle), in float64."""
    half = width // 2
    head = row[:, :width].double()
    pairs = head.view(-1, half, 2) if interleaved else head.view(-1, 2, half).transpose(1, 2)
    angle = position / 100.0 ** (torch.arange(half, dtype=torch.float64) / half)
    number = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.full_like(angle, 1.25), angle)
    pairs = torch.view_as_real(number)
    head = pairs.flatten(1) if interleaved else pairs.transpose(1, 2).flatten(1)
    return torch.cat((head, row[:, width:].double()), dim=1)


def table(num_positions: int, half: int) -> torch.Tensor:
    """A table with a magnitude of its own, as YaRN's has."""
    angle = torch.outer(
        torch.arange(num_positions, dtype=torch.float64),
        1 / 100.0 ** (torch.arange(half, dtype=torch.float64) / half),
    )
    return (1.25 * torch.stack((angle.cos(), angle.sin()), dim=-1)).float()


@pytest.mark.parametrize("run", [reference, launch], ids=["reference", "triton"])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("width, interleaved", [(16, False), (16, True), (8, False), (8, True), (0, False)])
def test_rows_are_turned_by_their_positions_and_stored_at_their_slots(
    device, run, cache_dtype, width, interleaved
):
    torch.manual_seed(width + interleaved)
    dtype = torch.bfloat16 if cache_dtype == FP8 else cache_dtype
    rows, heads, kv_heads, dim, page_size, pages = 7, 6, 3, 16, 4, 5
    # A fused projection: q, k and v are slices of wider rows, and the caches of one pool.
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype).to(device)
    qkv[0, heads + kv_heads] = 1000.0
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    poison = torch.full((pages, 2, kv_heads, page_size, dim), float("nan")).to(cache_dtype).to(device)
    pool = poison.clone()
    slots = torch.tensor([19, 0, -1, 7, 4, -5, 12], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 1, 5, 30, 29, 400, -3], device=device)
    cos_sin = table(31, width // 2).to(device) if width else None
    q_out = torch.full((rows, heads, dim), float("nan"), dtype=dtype, device=device)
    run(
        q,
        k,
        v,
        pool[:, 0],
        pool[:, 1],
        slots,
        cos_sin=cos_sin,
        positions=positions,
        interleaved=interleaved,
        q_out=q_out,
    )

    expected = poison.clone().cpu()
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        at = min(max(position, 0), 30)
        new_q = turned(q[row].cpu(), at, width, interleaved) if width else q[row].cpu()
        torch.testing.assert_close(
            q_out[row].cpu(), new_q.to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
        )
        if slot < 0:
            continue
        new_k = turned(k[row].cpu(), at, width, interleaved) if width else k[row].cpu()
        for field, value in ((0, new_k), (1, v[row].cpu())):
            value = value.to(dtype).float()
            expected[slot // page_size, field, :, slot % page_size] = (
                value.clamp(-448, 448) if cache_dtype == FP8 else value
            ).to(cache_dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, FP8: 0.13}[cache_dtype]
    torch.testing.assert_close(
        pool.cpu().float(), expected.float(), rtol=tolerance, atol=2e-3, equal_nan=True
    )
    # V is never turned, so it is exact.
    assert torch.equal(pool[:, 1].cpu().float().nan_to_num(7.0), expected[:, 1].float().nan_to_num(7.0))


def test_the_op_allocates_what_it_returns_and_leaves_q_alone(device):
    q, k = torch.randn(3, 2, 8, device=device), torch.randn(3, 1, 8, device=device)
    before, cache = q.clone(), torch.zeros(2, 1, 2, 8, device=device)
    slots = torch.tensor([0, 3, -1], dtype=torch.int32, device=device)
    positions = torch.tensor([1, 2, 3], device=device)
    out = rotate_append(
        q, k, k, cache, cache.clone(), slots, cos_sin=table(4, 4).to(device), positions=positions
    )
    assert torch.equal(q, before) and not torch.equal(out, before)
    torch.testing.assert_close(out[1].cpu(), turned(q[1].cpu(), 2, 8, False).float())
