"""Operands of kernels beside tensors: residuals, rows, places of blocks, matrices with their factors, formats of codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Residual(NamedTuple):
    """The residual of error feedback, as two flat tensors of one layout, which may share memory.

    Attributes:
        before: the residual before a step. It is only read, unless it shares memory with `after`.
        after: the residual after the step. The kernel or compressor writes all of it.
    """

    before: Tensor
    after: Tensor

    def plus(self, grad: Tensor) -> Tensor:
        """Write `before` + `grad` to `after`.

        Args:
            grad: the gradient, flat.

        Returns:
            `after`.
        """
        return torch.add(self.before, grad, out=self.after)

    def in_place(self) -> Tensor:
        """Return `after` as a copy of `before`, for arithmetic in place. Nothing is copied if they share memory."""
        if self.before is not self.after:
            self.after.copy_(self.before)
        return self.after


@dataclass(frozen=True)
class Block:
    """Rows of one size: the first element in a flat buffer, how many rows, elements of each, number of the first row."""

    start: int
    rows: int
    size: int
    number: int

    def of(self, flat: Tensor) -> Tensor:
        """The rows in a flat buffer, as a matrix."""
        return flat[self.start : self.start + self.rows * self.size].view(self.rows, self.size)

    def of_rows(self, used: Tensor) -> Tensor:
        """The part of a vector of all rows that these have."""
        return used[self.number : self.number + self.rows]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a flat buffer, equal to themselves alone: what is prepared for them is looked up at every step."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class Places:
    """The places in a flat vector of the blocks of a payload that do not lie one behind the other.

    Attributes:
        table: int64 (blocks of a period, 2), contiguous: the first element of each block, and how many elements it has.
        blocks: the number of blocks in all rows of the payload, a multiple of the period.
        stride: the elements by which the blocks of a period lie behind those of the period before.
        aligned: True if all first elements are multiples of 4.

    Raises:
        ValueError: `table` has another dtype or shape, or does not divide `blocks`.
    """

    table: Tensor
    blocks: int
    stride: int = 0
    aligned: bool = False

    def __post_init__(self) -> None:
        table, shape = self.table, tuple(self.table.shape)
        if table.dtype != torch.int64 or len(shape) != 2 or shape[1] != 2 or not table.is_contiguous():
            raise ValueError(f"places are a contiguous table of int64 (blocks, 2), got {table.dtype} {shape}")
        if not shape[0] or self.blocks % shape[0]:
            raise ValueError(f"a table of {shape[0]} blocks does not divide {self.blocks} blocks")

    @cached_property
    def cut(self) -> tuple[Tensor, int, int]:
        """The table, its blocks and the stride."""
        return self.table, len(self.table), self.stride

    def spans(self) -> tuple[Tensor, Tensor]:
        """Return the first element of each block, and how many elements it has."""
        periods = self.blocks // len(self.table)
        behind = torch.arange(periods, device=self.table.device).mul_(self.stride).unsqueeze(1)
        return (behind + self.table[:, 0]).view(-1), self.table[:, 1].repeat(periods)

    def elements(self, block: int) -> tuple[Tensor, Tensor]:
        """Return the place of each element of each block of `block`, and True if it is in the vector: (blocks, block)."""
        firsts, counts = self.spans()
        lane = torch.arange(block, device=firsts.device)
        return firsts.unsqueeze(1) + lane, lane < counts.unsqueeze(1)


def in_blocks(flat: Tensor, blocks: int, block: int, places: Places | None) -> Tensor:
    """Return the elements of each block, (blocks, block), with zeros where a block has fewer."""
    if places is None:
        return pad(flat, (0, blocks * block - flat.numel())).view(blocks, block)
    elements, inside = places.elements(block)
    return pad(flat, (0, 1))[elements.where(inside, flat.numel())]  # no mask: tensors of no memory know no True


def out_of_blocks(padded: Tensor, numel: int, places: Places | None) -> Tensor:
    """Return the elements of blocks, (blocks, block), in a flat vector of `numel`, with zeros between the blocks."""
    if places is None:
        return padded.view(-1)[:numel]
    elements, inside = places.elements(padded.shape[1])
    flat = padded.new_zeros(numel + 1)
    flat[elements.where(inside, numel)] = padded
    return flat[:numel]


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


class Format(NamedTuple):
    """The numbers that codes stand for, in scales of their block, up to `limit`. The block's largest magnitude is `steps`.

    `offset`: what code 0 stands for.
    """

    limit: float
    steps: float
    offset: float = 0.0


FORMATS = {  # by bits
    8: Format(127, 127.0),
    4: Format(7, 8.0),  # more steps than there are codes loses least where tails are heavy
    2: Format(1.5, 2.0, offset=0.5),  # nothing is off by more than half a scale
}
