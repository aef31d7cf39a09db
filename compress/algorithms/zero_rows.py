"""Rows of parameters that are zero on all ranks stay exactly zero, whatever a code makes of zeros.

One bit for each row travels with the gradient: whether any of its elements, or of what is held back of them, is not zero
here. Rows without a bit of any rank are cleared, in the average and in all that is held back.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from ...kernels import Block, Factors, Residual, Rows, clear_rows, mark_rows
from ..protocol.block_tables import sizes_within
from ..protocol.layout import Layout
from ..protocol.requests import AllGather, Program
from ..state.leaf import BLOCK
from .payload import padded


class ZeroRows:
    """The rows of a bucket, or of factors: which are used here, and which may be cleared."""

    def __init__(self, blocks: Sequence[Block], sizes: Sequence[int] = ()) -> None:
        self._rows, self._sizes = _rows(tuple(blocks)), sizes
        self.count = max((block.number + block.rows for block in blocks), default=0)
        self._parts: dict[tuple[int, int, bool], Rows] = {}
        self._repeated: dict[tuple[int, int], ZeroRows] = {}
        self._places: Tensor | None = None  # of a byte's bits

    @classmethod
    def of_layout(cls, layout: Layout) -> ZeroRows:
        """Rows of parameters along their first dimension, or what a layout has of them; a vector is one row."""
        blocks: list[Block] = []
        number = 0
        starts = layout.starts or (0,) * len(layout.names)
        for offset, size, row, start in zip(layout.offsets, layout.sizes, layout.rows, starts, strict=True):
            for begin, rows, elements in _cut(start, start + size, row or start + size):
                blocks.append(Block(offset + begin - start, rows, elements, number))
                number += rows
        return cls(blocks, layout.sizes)

    @classmethod
    def of_factors(cls, factors: Factors) -> ZeroRows:
        """Rows of the P of each matrix, whose vectors lie one behind the other."""
        blocks: list[Block] = []
        number = 0
        for matrix, start in zip(factors.matrices, factors.left_offsets, strict=False):
            rows = matrix.rows
            blocks += [Block(start + vector * rows, rows, 1, number) for vector in range(matrix.rank)]
            number += rows
        return cls(blocks)

    def before(self, others: ZeroRows, elements: int) -> ZeroRows:
        """These rows, and others in a buffer that begins so many elements behind."""
        blocks = others._rows.blocks
        return ZeroRows(
            [*self._rows.blocks, *(replace(b, start=b.start + elements, number=b.number + self.count) for b in blocks)]
        )

    def repeated(self, ranks: int, stride: int) -> ZeroRows:
        """The same rows on so many ranks, each so many elements behind the one before; the bits of each fill bytes."""
        if (ranks, stride) not in self._repeated:
            bits = 8 * self.row_bytes(1)
            places = ((block, rank) for rank in range(ranks) for block in self._rows.blocks)
            made = ZeroRows(
                [Block(b.start + rank * stride, b.rows, b.size, b.number + rank * bits) for b, rank in places]
            )
            made.count = ranks * bits
            self._repeated[ranks, stride] = made
        return self._repeated[ranks, stride]

    def used(self, grad: Tensor, residual: Residual | None, ranks: int = 1) -> Tensor:
        """Return True for each row with an element other than zero, and room for so many parts of bytes: see `packed`."""
        used = torch.zeros(ranks * self.row_bytes(ranks) * 8, dtype=torch.bool, device=grad.device)
        for numbers in (grad,) if residual is None else (grad, residual.before):
            self.mark(used, numbers)
        return used

    def mark(self, used: Tensor, flat: Tensor, part: tuple[int, int] | None = None) -> None:
        """Set True for each row with an element other than zero in `flat`: a part of the bucket, or its residual's codes."""
        mark_rows(flat, used, self._within(flat, part))

    def clear(self, used: Tensor, flat: Tensor, part: tuple[int, int] | None = None) -> None:
        """Put zeros into the rows that are not `used`, of `flat`: a part of the bucket, or its residual's codes."""
        clear_rows(flat, used, self._within(flat, part))

    def _within(self, flat: Tensor, part: tuple[int, int] | None) -> Rows:
        """The parts of rows that lie in a part of the bucket, by their places there, or in codes (see `Narrow`)."""
        coded = flat.dtype == torch.int8
        first, end = part or (0, sum(self._sizes) if coded else flat.numel())
        if (first, end, coded) not in self._parts:
            sizes = sizes_within(self._sizes, first, end)
            ends = list(accumulate(self._sizes))
            padding = list(accumulate((-size % BLOCK for size in sizes), initial=0)) if coded else []
            found: list[Block] = []
            for block in self._rows.blocks:
                begin = max(0, first - block.start)
                stop = min(block.rows * block.size, end - block.start)
                shift = padding[bisect_right(ends, block.start)] - first if coded else -first
                for place, rows, size in _cut(begin, stop, block.size):
                    number = block.number + place // block.size
                    found.append(Block(block.start + place + shift, rows, size, number))
            self._parts[first, end, coded] = _rows(tuple(found))
        return self._parts[first, end, coded]

    def row_bytes(self, ranks: int) -> int:
        """Bytes of the bits of each of so many equal parts of the rows."""
        return padded(-(-self.count // (8 * ranks)))

    def packed(self, used: Tensor, ranks: int, out: Tensor | None = None) -> Tensor:
        """A bit for each row, (ranks, bytes), of what `used` gave for so many ranks; in `out`, where it is given."""
        shifted = used.view(torch.uint8).view(ranks, -1, 8) << self._shifts(used.device)
        return torch.sum(shifted, 2, dtype=torch.uint8, out=out)

    def _shifts(self, device: torch.device) -> Tensor:
        if self._places is None:
            self._places = torch.arange(8, dtype=torch.uint8, device=device)
        return self._places

    def unpacked(self, bits: Tensor) -> Tensor:
        """Return the booleans that `packed` packed."""
        return ((bits.unsqueeze(-1) >> self._shifts(bits.device)) & 1).view(torch.bool).view(-1)

    def used_anywhere(self, used: Tensor) -> Program[Tensor]:
        """Return True for the rows that any rank uses; one round."""
        if not self.count:
            return used
        everyones = yield AllGather(self.packed(used, 1).view(-1))
        return self.unpacked(any_of(everyones))


def any_of(votes: Tensor, out: Tensor | None = None) -> Tensor:
    """Bits that any voter set; `votes`: (voters, bytes)."""
    while len(votes) > 2:
        half = -(-len(votes) // 2)
        votes = votes[:half] | votes[-half:]  # the middle one of an odd number counts twice
    return torch.bitwise_or(votes[0], votes[-1], out=out)


def _cut(first: int, end: int, row: int) -> Iterator[tuple[int, int, int]]:
    """(first element, rows, elements of each) of a part of rows of `row` elements: a last part, whole ones, a first part.

    >>> list(_cut(2, 9, 4))
    [(2, 1, 2), (4, 1, 4), (8, 1, 1)]
    """
    if first >= end:
        return
    whole = min(end, -(-first // row) * row)
    if first < whole:
        yield first, 1, whole - first
    count = (end - whole) // row
    if count:
        yield whole, count, row
    if (rest := end - whole - count * row) > 0:
        yield whole + count * row, 1, rest


@functools.lru_cache(maxsize=1024)
def _rows(blocks: tuple[Block, ...]) -> Rows:
    """Equal blocks share their rows: `adaptive` tries compressors anew now and then, and a GPU would wait for new tables."""
    return Rows(blocks)
