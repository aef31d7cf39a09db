"""Gram-Schmidt by one program for each factor: vector after vector, for what Cholesky cannot do.

Against all earlier ones at once and again until nothing is lost ("twice is enough", Giraud, Langou, Rozloznik 2005). A
vector that the earlier ones span is replaced by the axis that they cover least.
"""

from __future__ import annotations

import triton
import triton.language as tl

DEPENDENT = tl.constexpr(2.5e-13)  # squared length of what rounding leaves of a unit vector that others span
ALMOST = tl.constexpr(1e-4)
INDEPENDENT = tl.constexpr(0.25)


@triton.jit
def gram_schmidt(p: tl.tensor, rows: tl.tensor, rank: tl.tensor, RANKS: tl.constexpr, TILE: tl.constexpr) -> None:
    """Orthonormal vectors in place of `rank` of `rows` elements, one behind the other; NaN where one is not finite."""
    if _scale(p, rows, rank, RANKS, TILE):
        for index in range(0, rank):
            _add_vector(p, rows, index, RANKS, TILE)


@triton.jit
def _scale(p: tl.tensor, rows: tl.tensor, rank: tl.tensor, RANKS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Divide each vector by its largest magnitude, all by NaN where one is not finite; whether all are."""
    vector = tl.arange(0, RANKS)[:, None]
    starts = p + vector * rows.to(tl.int64)
    largest = tl.zeros([RANKS, TILE], tl.float32)
    finite = tl.full([RANKS, TILE], 1, tl.int32)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)[None, :]
        numbers = tl.abs(tl.load(starts + row, mask=(vector < rank) & (row < rows), other=0))
        largest = tl.maximum(largest, numbers)
        finite = finite & (numbers < float("inf")).to(tl.int32)
    all_finite = tl.min(tl.min(finite, 1), 0) == 1
    scale = tl.max(largest, 1)[:, None]
    scale = tl.where(all_finite, tl.where(scale == 0, 1.0, scale), float("nan"))
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)[None, :]
        inside = (vector < rank) & (row < rows)
        numbers = tl.load(starts + row, mask=inside, other=0)
        tl.store(starts + row, tl.div_rn(numbers, scale), mask=inside)
    tl.debug_barrier()
    return all_finite


@triton.jit
def _add_vector(p: tl.tensor, rows: tl.tensor, index: tl.tensor, RANKS: tl.constexpr, TILE: tl.constexpr) -> None:
    """Make one vector orthonormal to those before it."""
    passes = 0
    while passes < 3:
        parts, squared = _parts(p, rows, index, RANKS, TILE)
        # What the first passes leave of a vector that others span is rounding, in any direction.
        least = tl.where(passes == 0, 0.0, tl.where(passes == 1, DEPENDENT, ALMOST))
        if squared <= least:
            _replace(p, rows, index, RANKS, TILE)
            passes = 0
        else:
            _subtract(p, rows, index, parts, squared, RANKS, TILE)
            passes = tl.where((passes == 1) & (squared > INDEPENDENT), 3, passes + 1)


@triton.jit
def _parts(p: tl.tensor, rows: tl.tensor, index: tl.tensor, RANKS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """The products of a vector with all before it (RANKS, 1), and with itself."""
    vector = tl.arange(0, RANKS)[:, None]
    starts = p + vector * rows.to(tl.int64)
    own = p + index * rows.to(tl.int64)
    products = tl.zeros([RANKS, TILE], tl.float32)
    squares = tl.zeros([1, TILE], tl.float32)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)[None, :]
        this = tl.load(own + row, mask=row < rows, other=0)
        products += this * tl.load(starts + row, mask=(vector < index) & (row < rows), other=0)
        squares += this * this
    return tl.sum(products, 1)[:, None], tl.sum(tl.sum(squares, 1), 0)


@triton.jit
def _subtract(
    p: tl.tensor, rows: tl.tensor, index: tl.tensor, parts: tl.tensor, squared: tl.tensor,
    RANKS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Take from a vector, at length 1, its parts along those before it."""
    vector = tl.arange(0, RANKS)[:, None]
    starts = p + vector * rows.to(tl.int64)
    own = p + index * rows.to(tl.int64)
    length = tl.sqrt_rn(squared)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)[None, :]
        this = tl.load(own + row, mask=row < rows, other=0)
        before = tl.load(starts + row, mask=(vector < index) & (row < rows), other=0)
        rest = tl.div_rn(this - tl.sum(parts * before, 0)[None, :], length)
        tl.debug_barrier()  # where several threads load an element, all have before one stores it
        tl.store(own + row, rest, mask=row < rows)
    tl.debug_barrier()


@triton.jit
def _replace(p: tl.tensor, rows: tl.tensor, index: tl.tensor, RANKS: tl.constexpr, TILE: tl.constexpr) -> None:
    """Make a vector the axis along which those before it are shortest, the first of such."""
    vector = tl.arange(0, RANKS)[:, None]
    starts = p + vector * rows.to(tl.int64)
    own = p + index * rows.to(tl.int64)
    least = tl.full([1, TILE], float("inf"), tl.float32)
    where = tl.zeros([1, TILE], tl.int32)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)[None, :]
        before = tl.load(starts + row, mask=(vector < index) & (row < rows), other=0)
        covered = tl.where(row < rows, tl.sum(before * before, 0)[None, :], float("inf"))
        where = tl.where(covered < least, row, where)
        least = tl.minimum(covered, least)
    smallest = tl.min(tl.min(least, 1), 0)
    axis = tl.min(tl.min(tl.where(least == smallest, where, rows), 1), 0)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)[None, :]
        tl.store(own + row, (row == axis).to(tl.float32), mask=row < rows)
    tl.debug_barrier()
