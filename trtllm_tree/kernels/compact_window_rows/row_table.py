"""`RowTable`: which memory the rows of one slot numbering live in.

Owns the address table that `compact_window_rows` works on. It must not know what a row holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowTable:
    """Regions of memory that share one slot numbering, such as the K and V of every layer of a cache group.

    A slot is page * page_size + offset; its row is [num_heads] pieces of `row_bytes` bytes. Strides are in
    bytes. `addresses` is int64 [num_regions] on the regions' device.
    """

    regions: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    num_heads: int
    page_size: int
    page_stride: int
    head_stride: int
    token_stride: int
    row_bytes: int
    word_bytes: int

    @classmethod
    def build(cls, regions: Sequence[torch.Tensor]) -> RowTable:
        """Table over views [num_pages, num_heads, page_size, D] of equal shape, strides and dtype.

        Strides may be any with a contiguous last dimension. Views of the same address appear once. The
        table holds addresses, so the regions must stay where they are. Not for use inside a round.
        """
        assert regions, "no regions"
        unique = tuple({region.data_ptr(): region for region in regions}.values())
        first = unique[0]
        assert first.dim() == 4, "a region must be [num_pages, num_heads, page_size, D]"
        assert first.stride(3) == 1 or first.shape[3] == 1, "the last dimension must be contiguous"
        for region in unique:
            assert region.shape == first.shape, "regions differ in shape"
            assert region.stride() == first.stride(), "regions differ in strides"
            assert region.dtype == first.dtype, "regions differ in dtype"
            assert region.device == first.device, "regions differ in device"
        size = first.element_size()
        addresses = [region.data_ptr() for region in unique]
        # The stride of a dimension of one element is arbitrary and never used.
        strides = [
            0 if n == 1 else s * size for n, s in zip(first.shape[:3], first.stride()[:3], strict=True)
        ]
        row_bytes = first.shape[3] * size
        return cls(
            regions=unique,
            addresses=torch.tensor(addresses, dtype=torch.int64, device=first.device),
            num_heads=first.shape[1],
            page_size=first.shape[2],
            page_stride=strides[0],
            head_stride=strides[1],
            token_stride=strides[2],
            row_bytes=row_bytes,
            word_bytes=next(
                w for w in (8, 4, 2, 1) if all(x % w == 0 for x in (*addresses, *strides, row_bytes))
            ),
        )
