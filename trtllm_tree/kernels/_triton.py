"""Where kernels get Triton from, and what all of them share.

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


@triton.jit
def bit_or(a, b):
    """For `tl.reduce`: the union of bits."""
    return a | b


@triton.jit
def rank_key(score, index):
    """int64 that orders by score and then by lower index; NaN is -inf, and -0.0 is 0.0."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    # Negative floats order backwards as integers: flip all but their sign.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def key_index(key):
    """The index of a `rank_key`."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def key_score(key):
    """The score of a `rank_key`."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


__all__ = ["INTERPRET", "bit_or", "dot_dtype", "key_index", "key_score", "rank_key", "tl", "triton"]
