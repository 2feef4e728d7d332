"""Triton kernel of `accepted_rows`: one program a request."""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton
from trtllm_tree.kernels.accepted_rows.lane_rows import LaneRows


@triton.jit
def _place_lanes(
    frontier,
    positions_ptr,
    slots_ptr,
    page_table_ptr,
    num_positions,
    num_rows,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Positions and cache slots of one request's lanes."""
    step = tl.arange(0, BLOCK_S)
    tl.store(positions_ptr + step, (frontier + step).to(tl.int64), mask=step < num_positions)
    row = tl.arange(0, BLOCK_L)
    position = frontier + row
    index = position // PAGE_SIZE
    page = tl.load(page_table_ptr + index, mask=(row < num_rows) & (index < max_pages), other=0)
    tl.store(slots_ptr + row, tl.maximum(page, 0) * PAGE_SIZE + position % PAGE_SIZE, mask=row < num_rows)


@triton.jit
def accepted_rows_kernel(
    predict_ptr,
    accept_len_ptr,
    committed_lens_ptr,
    tokens_ptr,
    last_rows_ptr,
    roots_ptr,
    frontier_ptr,
    lane_positions_ptr,
    lane_slots_ptr,
    page_table_ptr,
    predict_stride_b,
    tokens_stride_b,
    lane_positions_stride_b,
    lane_slots_stride_b,
    page_table_stride_b,
    width,
    num_lane_positions,
    num_lane_rows,
    max_pages,
    HAS_LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_W)
    row = tl.load(predict_ptr + b * predict_stride_b + column, mask=column < width, other=0)
    tl.store(tokens_ptr + b * tokens_stride_b + column, tl.maximum(row, 0), mask=column < width)
    accept_len = tl.load(accept_len_ptr + b)
    root = tl.load(predict_ptr + b * predict_stride_b + accept_len - 1)
    tl.store(roots_ptr + b, tl.maximum(root, 0))
    tl.store(last_rows_ptr + b, b * width + tl.minimum(accept_len, width) - 1)
    frontier = tl.load(committed_lens_ptr + b) + accept_len
    tl.store(frontier_ptr + b, frontier)
    if HAS_LANES:
        _place_lanes(
            frontier,
            lane_positions_ptr + b * lane_positions_stride_b,
            lane_slots_ptr + b * lane_slots_stride_b,
            page_table_ptr + b * page_table_stride_b,
            num_lane_positions,
            num_lane_rows,
            max_pages,
            PAGE_SIZE,
            BLOCK_S,
            BLOCK_L,
        )


def _constexprs(width: int, page_size: int, num_positions: int, num_rows: int) -> dict[str, object]:
    """Of a launch with lanes; one without has no page size, positions or rows."""
    return {
        "HAS_LANES": page_size > 0,
        "PAGE_SIZE": page_size,
        "BLOCK_W": triton.next_power_of_2(width),
        "BLOCK_S": triton.next_power_of_2(max(1, num_positions)),
        "BLOCK_L": triton.next_power_of_2(max(1, num_rows)),
    }


def launch(
    predict: torch.Tensor,
    accept_len: torch.Tensor,
    committed_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    last_rows: torch.Tensor,
    roots: torch.Tensor,
    frontier: torch.Tensor,
    lanes: LaneRows | None = None,
) -> None:
    """Launch the kernel; arguments as in the op."""
    batch, width = tokens.shape
    lane_tensors = (None,) * 3 if lanes is None else (lanes.positions, lanes.slots, lanes.page_table)
    widths = [0 if tensor is None else tensor.shape[1] for tensor in lane_tensors]
    page_size = 0 if lanes is None else lanes.page_size
    accepted_rows_kernel[(batch,)](
        predict,
        accept_len,
        committed_lens,
        tokens,
        last_rows,
        roots,
        frontier,
        *lane_tensors,
        predict.stride(0),
        tokens.stride(0),
        *(0 if tensor is None else tensor.stride(0) for tensor in lane_tensors),
        width,
        *widths,
        **_constexprs(width, page_size, widths[0], widths[1]),
        num_warps=1,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    signature = {
        name: "*i32:16" if name.endswith("_ptr") else "i32"
        for name in accepted_rows_kernel.arg_names
        if name.islower()
    }
    signature |= dict.fromkeys(("last_rows_ptr", "lane_positions_ptr"), "*i64:16")
    return [
        (accepted_rows_kernel, signature, _constexprs(*sizes), {"num_warps": 1})
        for sizes in ((6, 0, 0, 0), (6, 64, 4, 16), (9, 32, 8, 64))
    ]
