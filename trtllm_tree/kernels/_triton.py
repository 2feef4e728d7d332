"""The only place that imports Triton, and what all kernels share.

A kernel module imports `triton`, `tl`, `INTERPRET` and the helpers from here. It is imported only when a
kernel is about to run, so that a machine without Triton still runs every reference.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# The interpreter is chosen when a kernel is decorated, so this is fixed for the life of the process.
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


def dot_dtype(dtype: tl.dtype) -> tl.dtype:
    """Operand type for `tl.dot`: the interpreter multiplies bf16 bit patterns, so it gets float32."""
    return tl.float32 if INTERPRET else dtype


__all__ = ["INTERPRET", "dot_dtype", "tl", "triton"]
