"""Rows of parameters that are zero on all ranks stay exactly zero, whatever a code makes of zeros.

One bit for each row travels with the gradient: whether any of its elements, or of what is held back of them, is not zero
here. Rows without a bit of any rank are cleared, in the average and in all that is held back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import Factors, Residual
from ..protocol.layout import Layout
from ..protocol.requests import Program, all_gather
from .rows import padded


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


class ZeroRows:
    """The rows of a bucket, or of factors: which are used here, and which may be cleared."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self.blocks = tuple(blocks)
        self.count = max((block.number + block.rows for block in self.blocks), default=0)
        self._parts: dict[tuple[int, int], tuple[Block, ...]] = {}
        on_cpu = self.blocks if device.type == "cpu" else ()  # elsewhere nobody looks at first elements alone
        self._once = self.count == sum(block.rows for block in self.blocks)  # each row lies in one piece
        cpu = torch.device("cpu")
        firsts = [torch.arange(b.rows, device=cpu) * b.size + b.start for b in on_cpu if self._once]
        self._firsts = torch.cat([torch.arange(0, device=cpu), *firsts])

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
        return cls(blocks, layout.device)

    @classmethod
    def of_factors(cls, factors: Factors, device: torch.device) -> ZeroRows:
        """Rows of the P of each matrix, whose vectors lie one behind the other."""
        blocks: list[Block] = []
        number = 0
        for matrix, start in zip(factors.matrices, factors.left_offsets, strict=False):
            rows = matrix.rows
            blocks += [Block(start + vector * rows, rows, 1, number) for vector in range(matrix.rank)]
            number += rows
        return cls(blocks, device)

    def used(self, grad: Tensor, residual: Residual | None) -> Tensor:
        """Return True for each row with an element other than zero. A CPU reads rows up to the first."""
        used = torch.zeros(self.count, dtype=torch.bool, device=grad.device)
        for numbers in () if grad.is_meta else (grad,) if residual is None else (grad, residual.before):
            self._add(numbers, used)
        return used

    def _add(self, numbers: Tensor, used: Tensor) -> None:
        on_cpu = used.device.type == "cpu"
        if on_cpu and used.all():
            return
        if on_cpu and self._once:
            used |= numbers.index_select(0, self._firsts) != 0
            if used.all():
                return
        for block in self.blocks:
            mine = used[block.number : block.number + block.rows]
            mine |= _any(block.of(numbers), mine)

    def clear(self, used: Tensor, flat: Tensor, start: int = 0) -> None:
        """Put zeros into the rows that are not `used`, of `flat`, the bucket's elements from `start` on."""
        if flat.is_meta or (used.device.type == "cpu" and used.all()):
            return
        for block in self._within(start, start + flat.numel()):
            mine = used[block.number : block.number + block.rows]
            if flat.device.type == "cpu" and mine.all():
                continue
            block.of(flat).masked_fill_(~mine.unsqueeze(1), 0)

    def _within(self, first: int, end: int) -> tuple[Block, ...]:
        """The parts of rows that lie in a part of the bucket, by their places there."""
        if (first, end) not in self._parts:
            found: list[Block] = []
            for block in self.blocks:
                begin = max(0, first - block.start)
                stop = min(block.rows * block.size, end - block.start)
                for place, rows, size in _cut(begin, stop, block.size):
                    number = block.number + place // block.size
                    found.append(Block(block.start + place - first, rows, size, number))
            self._parts[first, end] = tuple(found)
        return self._parts[first, end]

    def row_bytes(self, ranks: int) -> int:
        """Bytes of the bits of each of so many equal parts of the rows."""
        return padded(-(-self.count // (8 * ranks)))

    def packed(self, used: Tensor, ranks: int) -> Tensor:
        """A bit for each row, (ranks, bytes)."""
        bits = used.new_zeros(ranks * self.row_bytes(ranks) * 8)
        bits[: self.count] = used
        shifts = torch.arange(8, dtype=torch.uint8, device=used.device)
        return (bits.view(ranks, -1, 8).to(torch.uint8) << shifts).sum(2, dtype=torch.uint8)

    def unpacked(self, bits: Tensor) -> Tensor:
        """Return the booleans that `packed` packed."""
        shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
        return ((bits.reshape(-1, 1) >> shifts) & 1).view(-1)[: self.count].bool()

    def used_anywhere(self, used: Tensor) -> Program[Tensor]:
        """Return True for the rows that any rank uses; one round."""
        if not self.count:
            return used
        everyones = yield from all_gather(self.packed(used, 1).view(-1))
        return self.unpacked(any_of(everyones))


def any_of(votes: Tensor) -> Tensor:
    """Bits that any voter set; `votes`: (voters, bytes)."""
    bits: Tensor = functools.reduce(torch.bitwise_or, votes.unbind())
    return bits


def _any(rows: Tensor, known: Tensor) -> Tensor:
    """Return True for rows with an element other than zero; a CPU does not read those `known` to have one."""
    if rows.shape[1] == 1:
        return rows.squeeze(1) != 0
    if rows.device.type != "cpu":
        largest: Tensor = torch.linalg.vector_norm(rows, torch.inf, dim=1)
        return largest != 0
    unknown = ~known
    if unknown.all():
        return rows.any(1)
    found = torch.zeros_like(known)
    found[unknown] = rows[unknown].any(1)
    return found


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
