"""The compiled module's names that Python code reads."""

from __future__ import annotations

from enum import Enum

import torch


class DataType(Enum):
    """Element types of caches, by the compiled module's names."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    BF16 = 7
    FP8 = 8
    NVFP4 = 10


_TORCH = {
    torch.float32: DataType.FLOAT,
    torch.float16: DataType.HALF,
    torch.bfloat16: DataType.BF16,
    torch.float8_e4m3fn: DataType.FP8,
}


def torch_dtype_to_binding(dtype: torch.dtype) -> DataType:
    return _TORCH[dtype]
