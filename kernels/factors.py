"""The places of a bucket's matrices, and of the factors of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True)
class Matrix:
    """A matrix inside a flat buffer: its first element, its shape, and the rank of its factors."""

    offset: int
    rows: int
    columns: int
    rank: int


@dataclass(frozen=True, eq=False)
class Factors:
    """The matrices of a bucket and the places of their factors.

    Equal to itself alone: what is prepared for a bucket is looked up at every step, without a look at its matrices.
    """

    matrices: tuple[Matrix, ...]

    @cached_property
    def left_offsets(self) -> tuple[int, ...]:
        """First element of each P; the last entry is the number of elements of all."""
        return tuple(accumulate((m.rows * m.rank for m in self.matrices), initial=0))

    @cached_property
    def right_offsets(self) -> tuple[int, ...]:
        """First element of each Q; the last entry is the number of elements of all."""
        return tuple(accumulate((m.columns * m.rank for m in self.matrices), initial=0))

    def full(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of the matrices in the flat bucket."""
        for m in self.matrices:
            yield flat[m.offset : m.offset + m.rows * m.columns].view(m.rows, m.columns)

    def left(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of the transposed P factors, (rank, rows)."""
        for m, start in zip(self.matrices, self.left_offsets, strict=False):
            yield flat[start : start + m.rows * m.rank].view(m.rank, m.rows)

    def right(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of the transposed Q factors, (rank, columns)."""
        for m, start in zip(self.matrices, self.right_offsets, strict=False):
            yield flat[start : start + m.columns * m.rank].view(m.rank, m.columns)
