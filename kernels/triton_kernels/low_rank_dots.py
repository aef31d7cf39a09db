"""The products of PowerSGD of higher ranks on tensor cores: one pass over a matrix, whatever the rank, up to `LARGEST`.

A number is split into two of tensor cores' 10 bits each, and the three products that matter are added up in float32, which
keeps the accuracy of float32 ("3xTF32", Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022).
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from .launching import launched, options, power_of_two, shared_kilobytes
from .tasks import Tiling
from .tiles import FIELDS, rounded, told

Launch: TypeAlias = tuple[Tiling, dict[str, Any]]  # how matrices are cut, and what a kernel takes as constants
SMALLEST, LARGEST = 16, 64  # factor vectors of a pass; of more it takes several
SUMMED = 32  # ranks that are summed over at a time
WARPS = 4
# Rows and columns of a matrix at a time, loads ahead, tasks that fill a multiprocessor: the best on an H100 without spills.
LEFT, FINISH, RIGHT = (64, 32, 3, 4), (64, 32, 1, 8), (16, 64, 4, 8)
ROOMY = 200  # KiB of shared memory of a multiprocessor that two programs from the left take, of the most ranks
PRECISION = "ieee" if torch.version.hip else "tf32x3"  # AMD's matrix cores have float32 itself


@functools.cache
def dots_by_rows(rank: int, device: torch.device) -> Launch:
    """For the kernel whose tasks are pieces of rows: spans so long that partial sums are few against what is read.

    Of the most ranks, fewer loads ahead where two programs would not share a multiprocessor otherwise.
    """
    rows, columns, stages, resident = LEFT
    ranks = _ranks(rank)
    stages -= ranks == LARGEST and shared_kilobytes(device) < ROOMY
    return Tiling(True, rows, columns, 8 * ranks * rows, resident), _settings(ranks, rows, columns, stages)


@functools.cache
def dots_over_ranks(rank: int) -> Launch:
    """For the kernel that sums over the ranks: it takes fewer of them at a time, in the same pass."""
    rows, columns, stages, resident = FINISH
    ranks = _ranks(rank)
    return Tiling(True, rows, columns, 8 * ranks * rows, resident), _settings(min(ranks, SUMMED), rows, columns, stages)


@functools.cache
def dots_by_columns(rank: int) -> Launch:
    """For the kernel whose tasks are pieces of columns."""
    rows, columns, stages, resident = RIGHT
    ranks = _ranks(rank)
    return Tiling(False, columns, rows, 8 * ranks * columns, resident), _settings(ranks, rows, columns, stages)


def _ranks(largest: int) -> int:
    return min(LARGEST, max(SMALLEST, power_of_two(largest)))


def _settings(ranks: int, rows: int, columns: int, stages: int) -> dict[str, Any]:
    sizes = {"RANKS": ranks, "ROWS": rows, "COLUMNS": columns, "PRECISION": PRECISION}
    return {**sizes, "num_stages": stages, **options(WARPS, fused=True)}


@launched
@triton.jit
def left_dots(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, q: tl.tensor, p: tl.tensor, work: tl.tensor, table: tl.tensor,
    HELD: tl.constexpr, MANY: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """`P = M Q` of a task; the first pass leaves M in `after`, where further ones read it."""
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    if ALIGNED:
        _left_dot(grad, before, after, q, p, work, task, 0, HELD, RANKS, ROWS, COLUMNS, PRECISION, True)
    elif tl.load(task + 10) == 0:
        _left_dot(grad, before, after, q, p, work, task, 0, HELD, RANKS, ROWS, COLUMNS, PRECISION, False)
    else:
        _left_dot(grad, before, after, q, p, work, task, 0, HELD, RANKS, ROWS, COLUMNS, PRECISION, True)
    if MANY:
        tl.debug_barrier()  # what one thread has left in `after` another reads
        for group in range(RANKS, tl.load(task + 3), RANKS):
            _left_dot(grad, before, after, q, p, work, task, group, False, RANKS, ROWS, COLUMNS, PRECISION, False)


@triton.jit
def _left_dot(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, q: tl.tensor, p: tl.tensor, work: tl.tensor,
    task: tl.tensor, group: tl.tensor,
    ADD: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.load(task + 1)
    columns = told(tl.load(task + 2), ALIGNED)
    rank = tl.load(task + 3)
    begin = told(tl.load(task + 7), ALIGNED)
    end = told(tl.load(task + 8), ALIGNED)
    target = tl.load(task + 9)
    row = tl.load(task + 6) + tl.arange(0, ROWS)[:, None]
    vector = group + tl.arange(0, RANKS)[:, None]
    start_of_row = told(tl.load(task), ALIGNED) + row * columns
    start_of_vector = told(tl.load(task + 5), ALIGNED) + vector * columns
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < end)
        if ADD:
            numbers = tl.load(before + start_of_row + column, mask=inside, other=0, eviction_policy="evict_first")
            place = grad + start_of_row + column
            numbers += tl.load(place, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32)
            tl.store(after + start_of_row + column, numbers, mask=inside)
        else:
            place = after + start_of_row + column
            numbers = tl.load(place, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32)
        factor = tl.load(q + start_of_vector + column, mask=(vector < rank) & (column < end), other=0)
        sums = tl.dot(numbers, tl.trans(factor), sums, input_precision=PRECISION)
    vector = group + tl.arange(0, RANKS)[None, :]
    out = tl.where(target >= 0, work + target, p + tl.load(task + 4))
    tl.store(out + vector * rows + row, sums, mask=(vector < rank) & (row < rows))


@launched
@triton.jit
def right_dots(
    matrices: tl.tensor, p: tl.tensor, q: tl.tensor, work: tl.tensor, table: tl.tensor,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """`Q = M^T P` of a task."""
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    for group in range(0, tl.load(task + 3), RANKS):
        if ALIGNED:
            _right_dot(matrices, p, q, work, task, group, RANKS, ROWS, COLUMNS, PRECISION, True)
        elif tl.load(task + 10) == 0:
            _right_dot(matrices, p, q, work, task, group, RANKS, ROWS, COLUMNS, PRECISION, False)
        else:
            _right_dot(matrices, p, q, work, task, group, RANKS, ROWS, COLUMNS, PRECISION, True)


@triton.jit
def _right_dot(
    matrices: tl.tensor, p: tl.tensor, q: tl.tensor, work: tl.tensor, task: tl.tensor, group: tl.tensor,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.load(task + 1)
    columns = told(tl.load(task + 2), ALIGNED)
    rank = tl.load(task + 3)
    end = tl.load(task + 8)
    target = tl.load(task + 9)
    column = told(tl.load(task + 6), ALIGNED) + tl.arange(0, COLUMNS)[None, :]
    vector = group + tl.arange(0, RANKS)[:, None]
    matrix = matrices + told(tl.load(task), ALIGNED)
    factor = p + tl.load(task + 4) + vector * rows
    sums = tl.zeros([RANKS, COLUMNS], tl.float32)
    for start in range(tl.load(task + 7), end, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < end) & (column < columns)
        place = matrix + row * columns + column
        numbers = tl.load(place, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32)
        row = start + tl.arange(0, ROWS)[None, :]
        parts = tl.load(factor + row, mask=(vector < rank) & (row < end), other=0)
        sums = tl.dot(parts, numbers, sums, input_precision=PRECISION)
    out = tl.where(target >= 0, work + target, q + tl.load(task + 5))
    tl.store(out + vector * columns + column, sums, mask=(vector < rank) & (column < columns))


@launched
@triton.jit
def finish_dots(
    grad: tl.tensor, residual: tl.tensor, p: tl.tensor, q: tl.tensor, table: tl.tensor,
    HELD: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """`P Q^T` of a task, and what it misses of M."""
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    if ALIGNED:
        _finish_dot(grad, residual, p, q, task, HELD, RANKS, ROWS, COLUMNS, PRECISION, True)
    elif tl.load(task + 10) == 0:
        _finish_dot(grad, residual, p, q, task, HELD, RANKS, ROWS, COLUMNS, PRECISION, False)
    else:
        _finish_dot(grad, residual, p, q, task, HELD, RANKS, ROWS, COLUMNS, PRECISION, True)


@triton.jit
def _finish_dot(
    grad: tl.tensor, residual: tl.tensor, p: tl.tensor, q: tl.tensor, task: tl.tensor,
    HELD: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.load(task + 1)
    columns = told(tl.load(task + 2), ALIGNED)
    rank = tl.load(task + 3)
    first = tl.load(task + 6)
    end = told(tl.load(task + 8), ALIGNED)
    row = first + tl.arange(0, ROWS)[:, None]
    start_of_row = told(tl.load(task), ALIGNED) + row * columns
    left = p + tl.load(task + 4)
    right = q + told(tl.load(task + 5), ALIGNED)
    for start in range(told(tl.load(task + 7), ALIGNED), end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < end)
        if HELD:
            numbers = tl.load(residual + start_of_row + column, mask=inside, other=0, eviction_policy="evict_first")
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for group in range(0, rank, RANKS):
            vector = group + tl.arange(0, RANKS)[:, None]
            across = first + tl.arange(0, ROWS)[None, :]
            lefts = tl.load(left + vector * rows + across, mask=(vector < rank) & (across < rows), other=0)
            rights = tl.load(right + vector * columns + column, mask=(vector < rank) & (column < end), other=0)
            product = tl.dot(tl.trans(lefts), rights, product, input_precision=PRECISION)
        sent = rounded(product, grad.dtype.element_ty)
        tl.store(grad + start_of_row + column, sent, mask=inside)
        if HELD:
            tl.store(residual + start_of_row + column, numbers - sent.to(tl.float32), mask=inside)
