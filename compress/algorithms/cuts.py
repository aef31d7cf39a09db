"""The cut of flat vectors into rows of payload, whose blocks begin anew at each parameter.

A block has one scale. If it held elements of two parameters, the one with the smaller gradients would be rounded to zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels import Places, Residual
from ..protocol.block_tables import ORDER, Span, Table, blocks_of, count_blocks, in_order, places_of, spans_of
from ..protocol.compressor import own_traits
from ..protocol.layout import Layout


@dataclass(frozen=True)
class Cut:
    """The rows of a codec's payload.

    Attributes:
        codec: the codec.
        length: the elements of a row, with its padding.
        served: the first element of this rank's row in the vector, and the one after its last.
        rows: the places of all rows' blocks; None if they lie one behind the other.
        own: the places of this rank's blocks in its own row.
        gaps: True if the rows have elements between blocks, which no block has.
    """

    codec: Any
    length: int
    served: tuple[int, int]
    rows: Places | None = None
    own: Places | None = None
    gaps: bool = False

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.codec.row_bytes(self.length))

    def _bound(self, act: Callable[..., None], places: Places | None) -> Callable[..., None]:
        return functools.partial(act, length=self.length, **({} if places is None else {"places": places}))

    @cached_property
    def encode(self) -> Callable[..., None]:
        """The codec's `encode` of all rows: (grad, residual, rows), and `key` and `counter` if it draws."""
        return self._bound(self.codec.encode, self.rows)

    @cached_property
    def encode_own(self) -> Callable[..., None]:
        """The codec's `encode` of this rank's row."""
        return self._bound(self.codec.encode, self.own)

    @cached_property
    def _decode(self) -> Callable[..., None]:
        return self._bound(self.codec.decode, self.rows)

    @cached_property
    def decode_own(self) -> Callable[..., None]:
        """The codec's `decode` of this rank's row: (rows, out)."""
        bound = self._bound(self.codec.decode, self.own)
        return functools.partial(_decode_with_gaps, bound) if self.gaps else bound

    def decode(self, rows: Tensor, out: Tensor, residual: Residual | None = None) -> None:
        """Decode all rows. What an `out` of 16 bits cannot hold goes to the residual."""
        if self.gaps:
            out.zero_()
        if residual is not None and out.dtype.itemsize < 4 and own_traits(self.codec).takes_16_bits:
            self._decode(rows, out, residual=residual.after)
        else:
            self._decode(rows, out)

    def repeated(self, ranks: int, stride: int) -> Cut:
        """Return the cut of so many rows like this rank's, each so many elements behind the one before."""
        own = self.own and Places(
            self.own.table, ranks * self.own.blocks, stride, self.own.aligned and not stride % ORDER
        )
        return Cut(self.codec, self.length, self.served, own, None, self.gaps)


def _decode_with_gaps(decode: Callable[..., None], rows: Tensor, out: Tensor) -> None:
    decode(rows, out.zero_())


def cut_bucket(codec: Any, layout: Layout, rows: int, own: int = 0) -> Cut:
    """Return the cut of a bucket into so many rows of as many blocks each; `own`: this rank's."""
    return _cut_bucket(codec, layout.sizes, rows, own, layout.device)


@functools.lru_cache(
    maxsize=1024
)  # `adaptive` tries compressors anew now and then, and a GPU would wait for new tables
def _cut_bucket(codec: Any, sizes: tuple[int, ...], ranks: int, rank: int, device: torch.device) -> Cut:
    numel = sum(sizes)
    length = codec.row_length(-(-numel // ranks))
    if _in_order(codec, sizes, length):
        start = min(rank * length, numel)
        return Cut(codec, length, (start, min(start + length, numel)))
    each = -(-count_blocks(sizes, codec.block) // ranks)
    length = codec.row_length(min(max(sizes), codec.block)) if each == 1 else each * codec.block
    start, stop = (_first(sizes, codec.block, row * each) for row in (rank, rank + 1))

    def table() -> Table:
        blocks = blocks_of(spans_of(sizes), codec.block)
        return np.concatenate([blocks, np.full((each * ranks - len(blocks), 2), (numel, 0))])

    def own() -> Table:
        return table()[rank * each : (rank + 1) * each] - (start, 0)

    return Cut(codec, length, (start, stop), places_of(each * ranks, table, device), places_of(each, own, device))


def cut_shards(codec: Any, rows: Sequence[Sequence[Span]], row: int, rank: int, device: torch.device) -> Cut:
    """Return the cut of rows of `row` elements: of each its parameters' spans, from its first element on.

    The rows have as many spans, and each span in all rows as much room: that of the longest of them. `rank`: this rank's
    place among the rows.
    """
    length, served = codec.row_length(row), (rank * row, (rank + 1) * row)
    sizes = [max(span[1] for span in column) for column in zip(*rows, strict=True)]
    alike = all(each == rows[0] for each in rows)
    if not own_traits(codec).blocks or (
        alike and sum(sizes) == row and _in_order(codec, sizes, length) and length == row
    ):
        return Cut(codec, length, served)
    count, gaps = count_blocks(sizes, codec.block), not alike or sum(sizes) < row
    length = codec.row_length(min(max(sizes), codec.block)) if count == 1 else count * codec.block
    own = places_of(count, lambda: blocks_of(rows[rank], codec.block, sizes), device)
    if alike:
        cut = Cut(codec, length, served, None, own, gaps).repeated(len(rows), row)
        return Cut(codec, length, served, cut.rows, own, gaps)

    def table() -> Table:
        tables = [blocks_of(spans, codec.block, sizes) for spans in rows]
        return np.concatenate([each + np.array((place * row, 0)) for place, each in enumerate(tables)])

    return Cut(codec, length, served, places_of(count * len(rows), table, device), own, gaps)


def _in_order(codec: Any, sizes: Sequence[int], length: int) -> bool:
    """Return True if no block of rows of `length` crosses the border of a parameter, or the codec has no blocks."""
    return not own_traits(codec).blocks or in_order(sizes, min(codec.block, length))


def _first(sizes: Sequence[int], block: int, place: int) -> int:
    """Return the first element of the block at a place; behind all blocks, the end of the vector."""
    first = 0
    for size in sizes:
        blocks = count_blocks([size], block)
        if place < blocks:
            return first + place * block
        first, place = first + size, place - blocks
    return first


def lengthened(flat: Tensor, rows: int, length: int) -> Tensor:
    """Return so many equal rows with zeros behind each, up to `length` elements; `flat` itself where they are as long.

    >>> lengthened(torch.ones(4), 2, 3)
    tensor([1., 1., 0., 1., 1., 0.])
    """
    row = flat.numel() // rows
    return flat if row == length else pad(flat.view(rows, row), (0, length - row)).view(-1)
