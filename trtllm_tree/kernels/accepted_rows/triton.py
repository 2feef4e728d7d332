"""Triton kernel of `accepted_rows`: one program a request."""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import tl, triton


@triton.jit
def accepted_rows_kernel(
    predict_ptr,
    accept_len_ptr,
    committed_lens_ptr,
    tokens_ptr,
    last_rows_ptr,
    roots_ptr,
    frontier_ptr,
    predict_stride_b,
    tokens_stride_b,
    width,
    BLOCK_W: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_W)
    row = tl.load(predict_ptr + b * predict_stride_b + column, mask=column < width, other=0)
    tl.store(tokens_ptr + b * tokens_stride_b + column, tl.maximum(row, 0), mask=column < width)
    accept_len = tl.load(accept_len_ptr + b)
    root = tl.load(predict_ptr + b * predict_stride_b + accept_len - 1)
    tl.store(roots_ptr + b, tl.maximum(root, 0))
    tl.store(last_rows_ptr + b, b * width + tl.minimum(accept_len, width) - 1)
    tl.store(frontier_ptr + b, tl.load(committed_lens_ptr + b) + accept_len)


def launch(
    predict: torch.Tensor,
    accept_len: torch.Tensor,
    committed_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    last_rows: torch.Tensor,
    roots: torch.Tensor,
    frontier: torch.Tensor,
) -> None:
    """Launch the kernel; arguments as in the op."""
    batch, width = tokens.shape
    accepted_rows_kernel[(batch,)](
        predict,
        accept_len,
        committed_lens,
        tokens,
        last_rows,
        roots,
        frontier,
        predict.stride(0),
        tokens.stride(0),
        width,
        BLOCK_W=triton.next_power_of_2(width),
        num_warps=1,
    )


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    signature = {
        name: "*i32:16" if name.endswith("_ptr") else "i32"
        for name in accepted_rows_kernel.arg_names
        if name.islower()
    }
    signature["last_rows_ptr"] = "*i64:16"
    return [(accepted_rows_kernel, signature, {"BLOCK_W": 8}, {"num_warps": 1})]
