"""`RowTable`: which memory the rows of a window live in, for all slot numberings whose rows move together.

Owns the tile table that `compact_window_rows` works on. It must not know what a row holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Words of a column tile at most. Eight rows of 256 words of 8 bytes are 16 KiB that one program has in flight.
MAX_TILE_WORDS = 256


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowTable:
    """Regions of memory in groups; a group shares one slot numbering, as the K and V of a cache group's layers do.

    A slot is page * page_size + offset. Its row is, in every region of the group, [num_heads] pieces of D
    elements. A column tile is a range of the words of that row, in one region.

    Attributes:
        groups: per group its distinct regions.
        tiles: int64 [num_tiles, 9] on the regions' device. A tile is: group, address of the region, first word,
            words per slot, words per piece, page size, and the strides of page, head and token in words.
        word_bytes: the largest word of which every address, stride and piece is a multiple.
        tile_words: words of a tile, a power of two; a row's last tile may hold fewer.
        run_words: power of two; words i * run_words to (i + 1) * run_words of every row lie together.
    """

    groups: tuple[tuple[torch.Tensor, ...], ...]
    tiles: torch.Tensor
    word_bytes: int
    tile_words: int
    run_words: int

    @classmethod
    def build(cls, groups: Sequence[Sequence[torch.Tensor]]) -> RowTable:
        """Table over groups of views [num_pages, num_heads, page_size, D].

        Views of one group have equal shape, strides and dtype, and groups may differ in each. Strides may be
        any with a contiguous last dimension. Views of one address appear once in a group; groups may share an
        address where their slots never do. The table holds addresses, so the regions must stay where they are.
        Not for use inside a round.
        """
        assert groups, "no groups"
        distinct = tuple(_distinct(regions) for regions in groups)
        lengths = [length for regions in distinct for length in _byte_lengths(regions[0])]
        addresses = [region.data_ptr() for regions in distinct for region in regions]
        word = next(w for w in (8, 4, 2, 1) if all(x % w == 0 for x in (*addresses, *lengths)))
        pieces = [_byte_lengths(regions[0])[0] // word for regions in distinct]
        widest = max(regions[0].shape[1] * piece for regions, piece in zip(distinct, pieces, strict=True))
        tile_words = min(MAX_TILE_WORDS, 1 << (widest - 1).bit_length())
        tiles = []
        for group, (regions, piece) in enumerate(zip(distinct, pieces, strict=True)):
            num_words, page_size = regions[0].shape[1] * piece, regions[0].shape[2]
            strides = [length // word for length in _byte_lengths(regions[0])[1:]]
            for region in regions:
                tiles += [
                    [group, region.data_ptr(), first, num_words, piece, page_size, *strides]
                    for first in range(0, num_words, tile_words)
                ]
        return cls(
            groups=distinct,
            tiles=torch.tensor(tiles, dtype=torch.int64, device=distinct[0][0].device),
            word_bytes=word,
            tile_words=tile_words,
            run_words=math.gcd(tile_words, *pieces),
        )


def _distinct(regions: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The regions of one group, one view per address."""
    assert regions, "a group without regions"
    distinct = tuple({region.data_ptr(): region for region in regions}.values())
    first = distinct[0]
    assert first.dim() == 4, "a region must be [num_pages, num_heads, page_size, D]"
    assert first.stride(3) == 1 or first.shape[3] == 1, "the last dimension must be contiguous"
    for region in distinct:
        assert region.shape == first.shape, "regions of a group differ in shape"
        assert region.stride() == first.stride(), "regions of a group differ in strides"
        assert region.dtype == first.dtype, "regions of a group differ in dtype"
    return distinct


def _byte_lengths(region: torch.Tensor) -> tuple[int, int, int, int]:
    """Bytes of a piece, and the byte strides of page, head and token."""
    size = region.element_size()
    # The stride of a dimension of one element is arbitrary and never used.
    page, head, token = (
        0 if n == 1 else s * size for n, s in zip(region.shape[:3], region.stride()[:3], strict=True)
    )
    return region.shape[3] * size, page, head, token
