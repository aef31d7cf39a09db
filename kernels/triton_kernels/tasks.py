"""Tables on the device of the tasks, one per program, that the products of many matrices are cut into.

A product has a dimension that stays (of rows for P, of columns for Q) and one that is summed over. A task computes a piece
of the first over a span of the second; where a matrix has several spans, they write partial sums into a workspace, which
are then added in order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..operands import Factors, Matrix
from .launching import divided, multiprocessors, tile

DIRECT = -1  # in place of a place in the workspace
VECTOR = 4  # elements that are loaded at once where all begin at multiples of so many
SUMS = tile(256, interpreted=4096)  # elements that a program adds up


@dataclass(frozen=True)
class Tiling:
    """The cut of a product: what stays, elements of it in a task, the step of a span, and bounds on tasks.

    `least`: elements of a matrix in a task, so that partial sums stay few against what is read. `resident`: tasks that
    fill a multiprocessor.
    """

    keeps_rows: bool
    piece: int
    step: int
    least: int
    resident: int


@dataclass(frozen=True)
class Tasks:
    """`table`: int64 (tasks, FIELDS), see `_fields`. `sums`: int64 (tasks, 5), where partial sums are to be added.

    `aligned`: whether all rows of all matrices begin at multiples of `VECTOR`.
    """

    table: Tensor
    sums: Tensor
    workspace: int
    aligned: bool


@functools.lru_cache(maxsize=1024)
def tasks_of(factors: Factors, cut: Tiling, device: torch.device) -> Tasks:
    """The tables of a bucket, made once; where a device is new to them, the host waits for the copy."""
    elements = sum(m.rows * m.columns for m in factors.matrices)
    size = max(cut.least, elements // (cut.resident * multiprocessors(device)))
    table: list[tuple[int, ...]] = []
    sums: list[tuple[int, ...]] = []
    workspace = 0
    for m, left, right in zip(factors.matrices, factors.left_offsets, factors.right_offsets, strict=False):
        spans = _spans(m, cut, size)
        kept, destination = (m.rows, left) if cut.keeps_rows else (m.columns, right)
        split = len(spans) > 1
        for number, span in enumerate(spans):
            target = workspace + number * kept * m.rank if split else DIRECT
            table.extend(_fields(m, left, right, first, span, target) for first in range(0, kept, cut.piece))
        if split:
            total = kept * m.rank
            sums.extend((workspace, total, len(spans), destination, first) for first in range(0, total, SUMS))
            workspace += len(spans) * total
    return Tasks(table_of(table, device), table_of(sums, device), workspace, all(fields[-1] for fields in table))


def _spans(m: Matrix, cut: Tiling, size: int) -> list[tuple[int, int]]:
    """Begin and end of each span, of about `size` elements together with a piece; at least one, maybe empty."""
    summed = m.columns if cut.keeps_rows else m.rows
    number = max(1, divided(summed * cut.piece, size))
    length = divided(divided(summed, number), cut.step) * cut.step
    return [(begin, min(begin + length, summed)) for begin in range(0, summed, length)] if summed else [(0, 0)]


def _fields(m: Matrix, left: int, right: int, first: int, span: tuple[int, int], target: int) -> tuple[int, ...]:
    aligned = not any(number % VECTOR for number in (m.offset, m.columns, right))
    return m.offset, m.rows, m.columns, m.rank, left, right, first, *span, target, aligned


def table_of(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Numbers of tasks on the device."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)


def vectors(factors: Factors) -> Iterator[tuple[int, int]]:
    """First element and length of every vector of the Q factors."""
    for m, start in zip(factors.matrices, factors.right_offsets, strict=False):
        for index in range(m.rank):
            yield start + index * m.columns, m.columns
