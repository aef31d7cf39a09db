"""The products of PowerSGD, all matrices of a bucket in one launch each.

A program is one warp, so that nothing waits for a barrier: its lanes lie along the columns, as memory does, and each keeps
the sums for several factor vectors in registers. Products and sums are those of float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..factors import Factors
from ..residual import Residual
from .launching import on_device, options, power_of_two, tile
from .tasks import SUMS, Cut, Tasks, tasks_of

COLUMNS = 128  # 4 for each lane of a warp
LEFT_RANKS, RIGHT_RANKS = 8, 16  # factor vectors that a pass over a matrix serves; of more it takes several
FIELDS = tl.constexpr(11)


def low_rank_left(grad: Tensor, residual: Residual | None, factors: Factors, q: Tensor, p: Tensor) -> None:
    """`P = M Q`, where M is `grad` + `residual.before`, left in `residual.after`."""
    if not factors.matrices:
        return
    ranks = _ranks(factors, LEFT_RANKS)
    cut = _by_rows(ranks)
    held = residual or Residual(grad, grad)
    sizes = {"HELD": residual is not None, "RANKS": ranks, "ROWS": cut.piece, "COLUMNS": COLUMNS}
    with on_device(grad):
        tasks = tasks_of(factors, cut, grad.device)
        work = _workspace(tasks, p)
        _left[(len(tasks.table),)](
            grad, *held, q, p, work, tasks.table, MANY=_many(factors, ranks), **sizes, **options(1, fused=True)
        )
        _add_partials(tasks, work, p)


def low_rank_right(matrices: Tensor, factors: Factors, p: Tensor, q: Tensor) -> None:
    """`Q = M^T P`."""
    if not factors.matrices:
        return
    ranks = _ranks(factors, RIGHT_RANKS)
    cut = _by_columns(ranks)
    sizes = {"RANKS": ranks, "ROWS": cut.step, "COLUMNS": COLUMNS}
    with on_device(matrices):
        tasks = tasks_of(factors, cut, matrices.device)
        work = _workspace(tasks, q)
        _right[(len(tasks.table),)](matrices, p, q, work, tasks.table, **sizes, **options(1, fused=True))
        _add_partials(tasks, work, q)


def low_rank_finish(grad: Tensor, residual: Tensor | None, factors: Factors, p: Tensor, q: Tensor) -> None:
    """`P Q^T` into `grad`; `residual`, which holds M, keeps M - P Q^T."""
    if not factors.matrices:
        return
    cut = _by_rows(_ranks(factors, LEFT_RANKS))
    held = grad if residual is None else residual
    sizes = {"HELD": residual is not None, "ROWS": cut.piece, "COLUMNS": COLUMNS}
    with on_device(grad):
        tasks = tasks_of(factors, cut, grad.device)
        _finish[(len(tasks.table),)](grad, held, p, q, tasks.table, **sizes, **options(1, fused=True))


def _ranks(factors: Factors, most: int) -> int:
    return min(most, power_of_two(max(m.rank for m in factors.matrices)))


def _many(factors: Factors, ranks: int) -> bool:
    return any(m.rank > ranks for m in factors.matrices)


def _by_rows(ranks: int) -> Cut:
    """Pieces of rows, fewer where more sums lie in registers; tasks long enough to reuse what they know of P."""
    return Cut(True, tile(8 if ranks <= 2 else 4, interpreted=64), COLUMNS, least=4096, resident=32)


def _by_columns(ranks: int) -> Cut:
    """As many rows at once as registers hold; spans so long that partial sums are few against what is read."""
    return Cut(False, COLUMNS, min(16, 64 // ranks), least=max(64, 16 * ranks) * COLUMNS, resident=16)


def _workspace(tasks: Tasks, factor: Tensor) -> Tensor:
    return factor.new_empty(tasks.workspace) if tasks.workspace else factor


def _add_partials(tasks: Tasks, work: Tensor, factor: Tensor) -> None:
    if tasks.workspace:
        _add[(len(tasks.sums),)](work, factor, tasks.sums, TILE=SUMS, **options(2))


@triton.jit
def _told(number: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """The same number, in a way that tells the compiler that it is a multiple of 4."""
    if ALIGNED:
        return number // 4 * 4
    else:
        return number


@triton.jit
def _left(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, q: tl.tensor, p: tl.tensor, work: tl.tensor, table: tl.tensor,
    MANY: tl.constexpr, HELD: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    if tl.load(task + 10) != 0:
        _left_groups(grad, before, after, q, p, work, task, MANY, HELD, RANKS, ROWS, COLUMNS, True)
    else:
        _left_groups(grad, before, after, q, p, work, task, MANY, HELD, RANKS, ROWS, COLUMNS, False)


@triton.jit
def _left_groups(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, q: tl.tensor, p: tl.tensor, work: tl.tensor, task: tl.tensor,
    MANY: tl.constexpr, HELD: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """The first factor vectors take up the residual; further ones read M, which these have left in `after`."""
    _left_group(grad, before, after, q, p, work, task, 0, HELD, RANKS, ROWS, COLUMNS, ALIGNED)
    if MANY:
        for group in range(RANKS, tl.load(task + 3), RANKS):
            _left_group(grad, before, after, q, p, work, task, group, False, RANKS, ROWS, COLUMNS, ALIGNED)


@triton.jit
def _left_group(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, q: tl.tensor, p: tl.tensor, work: tl.tensor,
    task: tl.tensor, group: tl.tensor,
    ADD: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.load(task + 1)
    columns = _told(tl.load(task + 2), ALIGNED)
    rank = tl.load(task + 3)
    first = tl.load(task + 6)
    begin = _told(tl.load(task + 7), ALIGNED)
    end = _told(tl.load(task + 8), ALIGNED)
    target = tl.load(task + 9)
    row = first + tl.arange(0, ROWS)[None, :, None]
    vector = group + tl.arange(0, RANKS)[:, None, None]
    start_of_row = _told(tl.load(task), ALIGNED) + row * columns
    start_of_vector = _told(tl.load(task + 5), ALIGNED) + vector * columns
    sums = tl.zeros([RANKS, ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, None, :]
        inside = (row < rows) & (column < end)
        if ADD:
            numbers = tl.load(before + start_of_row + column, mask=inside, other=0, eviction_policy="evict_first")
            numbers += tl.load(grad + start_of_row + column, mask=inside, other=0, eviction_policy="evict_first")
            tl.store(after + start_of_row + column, numbers, mask=inside)
        else:
            numbers = tl.load(after + start_of_row + column, mask=inside, other=0, eviction_policy="evict_first")
        sums += numbers * tl.load(q + start_of_vector + column, mask=(vector < rank) & (column < end), other=0)
    vector = group + tl.arange(0, RANKS)[:, None]
    row = first + tl.arange(0, ROWS)[None, :]
    out = tl.where(target >= 0, work + target, p + tl.load(task + 4))
    tl.store(out + vector * rows + row, tl.sum(sums, 2), mask=(vector < rank) & (row < rows))


@triton.jit
def _right(
    matrices: tl.tensor, p: tl.tensor, q: tl.tensor, work: tl.tensor, table: tl.tensor,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    for group in range(0, tl.load(task + 3), RANKS):
        if tl.load(task + 10) != 0:
            _right_group(matrices, p, q, work, task, group, RANKS, ROWS, COLUMNS, True)
        else:
            _right_group(matrices, p, q, work, task, group, RANKS, ROWS, COLUMNS, False)


@triton.jit
def _right_group(
    matrices: tl.tensor, p: tl.tensor, q: tl.tensor, work: tl.tensor, task: tl.tensor, group: tl.tensor,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    columns = _told(tl.load(task + 2), ALIGNED)
    rank = tl.load(task + 3)
    end = tl.load(task + 8)
    target = tl.load(task + 9)
    column = _told(tl.load(task + 6), ALIGNED) + tl.arange(0, COLUMNS)[None, :]
    vector = group + tl.arange(0, RANKS)[:, None]
    matrix = matrices + _told(tl.load(task), ALIGNED)
    factor = p + tl.load(task + 4) + vector * tl.load(task + 1)
    sums = tl.zeros([RANKS, COLUMNS], tl.float32)
    for start in range(tl.load(task + 7), end, ROWS):
        for step in tl.static_range(ROWS):
            row = start + step
            inside = column < tl.where(row < end, columns, 0)
            numbers = tl.load(matrix + row * columns + column, mask=inside, other=0, eviction_policy="evict_first")
            sums += numbers * tl.load(factor + row, mask=vector < tl.where(row < end, rank, 0), other=0)
    out = tl.where(target >= 0, work + target, q + tl.load(task + 5))
    tl.store(out + vector * columns + column, sums, mask=(vector < rank) & (column < columns))


@triton.jit
def _finish(
    grad: tl.tensor, residual: tl.tensor, p: tl.tensor, q: tl.tensor, table: tl.tensor,
    HELD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
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
    columns = _told(tl.load(task + 2), ALIGNED)
    rank = tl.load(task + 3)
    end = _told(tl.load(task + 8), ALIGNED)
    row = tl.load(task + 6) + tl.arange(0, ROWS)[:, None]
    start_of_row = _told(tl.load(task), ALIGNED) + row * columns
    left = p + tl.load(task + 4) + row
    right = q + _told(tl.load(task + 5), ALIGNED)
    for start in range(_told(tl.load(task + 7), ALIGNED), end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < end)
        if HELD:
            numbers = tl.load(residual + start_of_row + column, mask=inside, other=0, eviction_policy="evict_first")
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for vector in range(0, rank):
            product += tl.load(left + vector * rows, mask=row < rows, other=0) * tl.load(
                right + vector * columns + column, mask=column < end, other=0
            )
        tl.store(grad + start_of_row + column, product, mask=inside)
        if HELD:
            tl.store(residual + start_of_row + column, numbers - product, mask=inside)


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
