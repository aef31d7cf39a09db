"""The products of PowerSGD, all matrices of a bucket in one launch each, each matrix read once.

Of low ranks: a program is one warp, so that nothing waits for a barrier: its lanes lie along the columns, as memory does,
and each keeps the sums for all factor vectors in registers. Higher ranks are for tensor cores (`low_rank_dots`). Products
and sums are those of float32, whatever the dtype of the gradient.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from ..operands import Factors, Residual
from .launching import launched, on_device, options, power_of_two, tile
from .low_rank_dots import Launch, dots_by_columns, dots_by_rows, dots_over_ranks, finish_dots, left_dots, right_dots
from .tasks import SUMS, Tasks, Tiling, tasks_of
from .tiles import FIELDS, rounded, told

COLUMNS = 128  # 4 for each lane of a warp
RANKS = 8  # factor vectors, at most, of which a lane keeps the sums


def low_rank_left(grad: Tensor, residual: Residual | None, factors: Factors, q: Tensor, p: Tensor) -> None:
    """`P = M Q`, where M is `grad` + `residual.before`, left in `residual.after`."""
    if not factors.matrices:
        return
    rank = _rank(factors)
    kernel, (cut, settings) = (_left, _by_rows(rank)) if rank <= RANKS else (left_dots, dots_by_rows(rank, grad.device))
    held = residual or Residual(grad, grad)
    with on_device(grad):
        tasks = tasks_of(factors, cut, grad.device)
        work = _workspace(tasks, p)
        known = {"MANY": rank > settings["RANKS"], **_known(rank, tasks)} if rank > RANKS else {}
        kernel[(tasks.table.shape[0],)](
            grad, *held, q, p, work, tasks.table, HELD=residual is not None, **known, **settings
        )
        _add_partials(tasks, work, p)


def low_rank_right(matrices: Tensor, factors: Factors, p: Tensor, q: Tensor) -> None:
    """`Q = M^T P`."""
    if not factors.matrices:
        return
    rank = _rank(factors)
    kernel, (cut, settings) = (_right, _by_columns(rank)) if rank <= RANKS else (right_dots, dots_by_columns(rank))
    with on_device(matrices):
        tasks = tasks_of(factors, cut, matrices.device)
        work = _workspace(tasks, q)
        kernel[(tasks.table.shape[0],)](matrices, p, q, work, tasks.table, **_known(rank, tasks), **settings)
        _add_partials(tasks, work, q)


def low_rank_finish(grad: Tensor, residual: Tensor | None, factors: Factors, p: Tensor, q: Tensor) -> None:
    """`P Q^T` into `grad`, rounded to its dtype; `residual`, which holds M, keeps what `grad` misses of it."""
    if not factors.matrices:
        return
    rank = _rank(factors)
    kernel, (cut, settings) = (_finish, _by_rows(rank)) if rank <= RANKS else (finish_dots, dots_over_ranks(rank))
    held = grad if residual is None else residual
    with on_device(grad):
        tasks = tasks_of(factors, cut, grad.device)
        kernel[(tasks.table.shape[0],)](
            grad, held, p, q, tasks.table, HELD=residual is not None, **_known(rank, tasks), **settings
        )


def _rank(factors: Factors) -> int:
    return max(m.rank for m in factors.matrices)


def _known(rank: int, tasks: Tasks) -> dict[str, bool]:
    """Return the constants of kernels on tensor cores. Kernels of low ranks look at each task.

    Compiled for aligned matrices alone they take fewer registers, by waiting for one load after the other: on an H100 the
    product from the left then ran at 0.66 of a copy's speed, not 0.91.
    """
    return {"ALIGNED": tasks.aligned} if rank > RANKS else {}


@functools.cache
def _by_rows(rank: int) -> Launch:
    """Pieces of rows, fewer where more sums lie in registers; tasks long enough to reuse what they know of P."""
    rows = tile(8 if rank <= 2 else 4, interpreted=64)
    return Tiling(True, rows, COLUMNS, least=4096, resident=32), _settings(rank, rows)


@functools.cache
def _by_columns(rank: int) -> Launch:
    """Cut into as many rows as registers hold, and spans so long that partial sums are few against what is read."""
    ranks = power_of_two(rank)
    rows = min(8, 64 // ranks)
    return Tiling(False, COLUMNS, rows, least=max(64, 16 * ranks) * COLUMNS, resident=32), _settings(rank, rows)


def _settings(rank: int, rows: int) -> dict[str, int]:
    return {"RANKS": power_of_two(rank), "ROWS": rows, "COLUMNS": COLUMNS, **options(1, fused=True)}


def _workspace(tasks: Tasks, factor: Tensor) -> Tensor:
    return factor.new_empty(tasks.workspace) if tasks.workspace else factor


def _add_partials(tasks: Tasks, work: Tensor, factor: Tensor) -> None:
    if tasks.workspace:
        _add[(tasks.sums.shape[0],)](work, factor, tasks.sums, TILE=SUMS, **options(2))


@launched
@triton.jit
def _left(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, q: tl.tensor, p: tl.tensor, work: tl.tensor, table: tl.tensor,
    HELD: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    if tl.load(task + 10) != 0:
        _left_piece(grad, before, after, q, p, work, task, HELD, RANKS, ROWS, COLUMNS, True)
    else:
        _left_piece(grad, before, after, q, p, work, task, HELD, RANKS, ROWS, COLUMNS, False)


@triton.jit
def _left_piece(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, q: tl.tensor, p: tl.tensor, work: tl.tensor, task: tl.tensor,
    HELD: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.load(task + 1)
    columns = told(tl.load(task + 2), ALIGNED)
    rank = tl.load(task + 3)
    first = tl.load(task + 6)
    begin = told(tl.load(task + 7), ALIGNED)
    end = told(tl.load(task + 8), ALIGNED)
    target = tl.load(task + 9)
    row = first + tl.arange(0, ROWS)[None, :, None]
    vector = tl.arange(0, RANKS)[:, None, None]
    start_of_row = told(tl.load(task), ALIGNED) + row * columns
    start_of_vector = told(tl.load(task + 5), ALIGNED) + vector * columns
    sums = tl.zeros([RANKS, ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, None, :]
        inside = (row < rows) & (column < end)
        if HELD:
            numbers = tl.load(before + start_of_row + column, mask=inside, other=0, eviction_policy="evict_first")
            place = grad + start_of_row + column
            numbers += tl.load(place, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32)
            tl.store(after + start_of_row + column, numbers, mask=inside)
        else:
            place = after + start_of_row + column
            numbers = tl.load(place, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32)
        sums += numbers * tl.load(q + start_of_vector + column, mask=(vector < rank) & (column < end), other=0)
    vector = tl.arange(0, RANKS)[:, None]
    row = first + tl.arange(0, ROWS)[None, :]
    out = tl.where(target >= 0, work + target, p + tl.load(task + 4))
    tl.store(out + vector * rows + row, tl.sum(sums, 2), mask=(vector < rank) & (row < rows))


@launched
@triton.jit
def _right(
    matrices: tl.tensor, p: tl.tensor, q: tl.tensor, work: tl.tensor, table: tl.tensor,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    if tl.load(task + 10) != 0:
        _right_piece(matrices, p, q, work, task, RANKS, ROWS, COLUMNS, True)
    else:
        _right_piece(matrices, p, q, work, task, RANKS, ROWS, COLUMNS, False)


@triton.jit
def _right_piece(
    matrices: tl.tensor, p: tl.tensor, q: tl.tensor, work: tl.tensor, task: tl.tensor,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    columns = told(tl.load(task + 2), ALIGNED)
    rank = tl.load(task + 3)
    end = tl.load(task + 8)
    target = tl.load(task + 9)
    column = told(tl.load(task + 6), ALIGNED) + tl.arange(0, COLUMNS)[None, :]
    vector = tl.arange(0, RANKS)[:, None]
    matrix = matrices + told(tl.load(task), ALIGNED)
    factor = p + tl.load(task + 4) + vector * tl.load(task + 1)
    sums = tl.zeros([RANKS, COLUMNS], tl.float32)
    for start in range(tl.load(task + 7), end, ROWS):
        for step in tl.static_range(ROWS):
            row = start + step
            inside = column < tl.where(row < end, columns, 0)
            place = matrix + row * columns + column
            numbers = tl.load(place, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32)
            sums += numbers * tl.load(factor + row, mask=vector < tl.where(row < end, rank, 0), other=0)
    out = tl.where(target >= 0, work + target, q + tl.load(task + 5))
    tl.store(out + vector * columns + column, sums, mask=(vector < rank) & (column < columns))


@launched
@triton.jit
def _finish(
    grad: tl.tensor, residual: tl.tensor, p: tl.tensor, q: tl.tensor, table: tl.tensor,
    HELD: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    if tl.load(task + 10) != 0:
        _finish_piece(grad, residual, p, q, task, HELD, ROWS, COLUMNS, True)
    else:
        _finish_piece(grad, residual, p, q, task, HELD, ROWS, COLUMNS, False)


@triton.jit
def _finish_piece(
    grad: tl.tensor, residual: tl.tensor, p: tl.tensor, q: tl.tensor, task: tl.tensor,
    HELD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.load(task + 1)
    columns = told(tl.load(task + 2), ALIGNED)
    rank = tl.load(task + 3)
    end = told(tl.load(task + 8), ALIGNED)
    row = tl.load(task + 6) + tl.arange(0, ROWS)[:, None]
    start_of_row = told(tl.load(task), ALIGNED) + row * columns
    left = p + tl.load(task + 4) + row
    right = q + told(tl.load(task + 5), ALIGNED)
    for start in range(told(tl.load(task + 7), ALIGNED), end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < end)
        if HELD:
            numbers = tl.load(residual + start_of_row + column, mask=inside, other=0, eviction_policy="evict_first")
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for vector in range(0, rank):
            product += tl.load(left + vector * rows, mask=row < rows, other=0) * tl.load(
                right + vector * columns + column, mask=column < end, other=0
            )
        sent = rounded(product, grad.dtype.element_ty)
        tl.store(grad + start_of_row + column, sent, mask=inside)
        if HELD:
            tl.store(residual + start_of_row + column, numbers - sent.to(tl.float32), mask=inside)


@launched
@triton.jit
def _add(work: tl.tensor, factor: tl.tensor, table: tl.tensor, TILE: tl.constexpr) -> None:
    """Partial sums, in the order of their spans."""
    task = table + tl.program_id(0).to(tl.int64) * 5
    size = tl.load(task + 1)
    place = tl.load(task + 4) + tl.arange(0, TILE)
    part = work + tl.load(task)
    total = tl.zeros([TILE], tl.float32)
    for _ in range(0, tl.load(task + 2)):
        total += tl.load(part + place, mask=place < size, other=0)
        part += size
    tl.store(factor + tl.load(task + 3) + place, total, mask=place < size)
