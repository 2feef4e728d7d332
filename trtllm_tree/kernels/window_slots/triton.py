"""Triton kernel of `window_slots`: one program a request. It must not know who allocates pages."""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton


@triton.jit
def window_slots_kernel(
    first_positions_ptr,
    page_table_ptr,
    slots_ptr,
    num_rows,
    max_pages,
    page_table_stride_b,
    slots_stride_b,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_ROWS)
    position = tl.load(first_positions_ptr + b) + row
    index = position // PAGE_SIZE
    page = tl.load(
        page_table_ptr + b * page_table_stride_b + index, mask=(row < num_rows) & (index < max_pages), other=0
    )
    slot = tl.maximum(page, 0) * PAGE_SIZE + position % PAGE_SIZE
    tl.store(slots_ptr + b * slots_stride_b + row, slot, mask=row < num_rows)


def launch(
    first_positions: torch.Tensor, page_table: torch.Tensor, *, page_size: int, slots: torch.Tensor
) -> None:
    """Launch the kernel; arguments as in the op."""
    batch, num_rows = slots.shape
    window_slots_kernel[(batch,)](
        first_positions,
        page_table,
        slots,
        num_rows,
        page_table.shape[1],
        page_table.stride(0),
        slots.stride(0),
        PAGE_SIZE=page_size,
        BLOCK_ROWS=triton.next_power_of_2(num_rows),
        num_warps=1,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    signature = {
        name: "*i32:16" if name.endswith("_ptr") else "i32"
        for name in window_slots_kernel.arg_names
        if name.islower()
    }
    return [(window_slots_kernel, signature, {"PAGE_SIZE": 32, "BLOCK_ROWS": 64}, {"num_warps": 1})]
