"""Orthonormal bases, and unit vectors. Bases by Cholesky QR, twice, with Gram-Schmidt for what it cannot do.

Each program has a chunk of a factor's rows and sums the products of all pairs of vectors there (a part of the Gram matrix).
The next kernel adds up the parts of a factor's chunks, in order, once in every program: that is less than a launch of its
own. Products are summed in double precision, where squares of float32 neither overflow nor vanish, and conditions up to
about 1e5 leave a triangle (Yamamoto, Nakatsukasa, Yanagisawa, Fukaya, "Roundoff error analysis of the CholeskyQR2
algorithm", 2015). A basis depends on its factor alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operands import Factors
from .gram_schmidt import gram_schmidt
from .launching import divided, launched, on_device, options, power_of_two
from .tasks import table_of, vectors

FIELDS = tl.constexpr(7)
CHUNK, MOST_CHUNKS = 256, 128  # rows of a chunk, at least; chunks of a factor
LARGEST = 32  # ranks whose Gram matrix a program holds; others are for Gram-Schmidt alone
PRODUCTS = 4096  # sums that a program holds
HELD = 8192  # elements of all vectors together that Gram-Schmidt holds at a time
WARPS = 8
TILE = 4096  # elements of a vector
# Of vectors of length 1: the least square of what the vectors before leave of one, for Cholesky to be good enough.
LEAST_FIRST, LEAST_SECOND = tl.constexpr(1e-10), tl.constexpr(0.5)


@dataclass(frozen=True)
class Chunks:
    """`table`: int64 (chunks, FIELDS), see `_fields`; `ranks`: the power of two that holds the rank of all factors."""

    table: Tensor
    ranks: int


def orthogonalize(p: Tensor, factors: Factors) -> None:
    """Orthonormal vectors that span those of each P, in place; NaN for a P that is not finite."""
    if not factors.matrices:
        return
    with on_device(p):
        for chunks in _chunks(factors, p.device):
            if chunks.ranks <= LARGEST:
                _cholesky_qr(p, chunks)
            else:
                sizes = {"RANKS": chunks.ranks, "TILE": _tile(chunks)}
                _repair_all[(len(chunks.table),)](p, chunks.table, **sizes, **options(WARPS, fused=True))


def normalize(q: Tensor, factors: Factors, previous: Tensor | None = None) -> None:
    """Each vector of Q to length 1, in place; a zero vector becomes that of `previous`."""
    if not factors.matrices:
        return
    before = q if previous is None else previous
    with on_device(q):
        table = _vectors(factors, q.device)
        _normalize[(table.shape[0],)](q, before, table, TILE=TILE, **options(16, fused=True))


def _cholesky_qr(p: Tensor, chunks: Chunks) -> None:
    count = chunks.table.shape[0]
    squares = count * chunks.ranks**2
    first, second = (torch.empty(squares, dtype=torch.float64, device=p.device) for _ in range(2))
    triangles = torch.empty(squares, dtype=torch.float32, device=p.device)
    sizes = {"RANKS": chunks.ranks, **options(WARPS, fused=True)}
    step = min(CHUNK, max(1, PRODUCTS // chunks.ranks**2))
    _gram[(count,)](p, first, chunks.table, STEP=step, **sizes)
    _solve[(count,)](p, first, second, triangles, chunks.table, ROWS=CHUNK, STEP=step, **sizes)
    _refine[(count,)](p, second, triangles, chunks.table, ROWS=CHUNK, TILE=_tile(chunks), **sizes)


def _tile(chunks: Chunks) -> int:
    return max(1, HELD // chunks.ranks)


@functools.lru_cache(maxsize=1024)
def _chunks(factors: Factors, device: torch.device) -> tuple[Chunks, ...]:
    """The chunks of factors of like rank."""
    tables: dict[int, list[tuple[int, ...]]] = {}
    for m, start in zip(factors.matrices, factors.left_offsets, strict=False):
        ranks = power_of_two(m.rank)
        table = tables.setdefault(ranks, [])
        table += _fields(start, m.rows, m.rank, len(table), ranks <= LARGEST)
    return tuple(Chunks(table_of(table, device), ranks) for ranks, table in tables.items())


def _fields(start: int, rows: int, rank: int, first_chunk: int, cut: bool) -> list[tuple[int, ...]]:
    """Load for each chunk the factor's first element, rows and rank; its first chunk and how many; this one's rows."""
    length = max(CHUNK, divided(rows, MOST_CHUNKS)) if cut else rows
    count = divided(rows, length)
    return [
        (start, rows, rank, first_chunk, count, begin, min(begin + length, rows)) for begin in range(0, rows, length)
    ]


@functools.lru_cache(maxsize=1024)
def _vectors(factors: Factors, device: torch.device) -> Tensor:
    return table_of(list(vectors(factors)), device)


@launched
@triton.jit
def _gram(p: tl.tensor, products: tl.tensor, table: tl.tensor, RANKS: tl.constexpr, STEP: tl.constexpr) -> None:
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    _write_products(p, products, task, RANKS, STEP)


@launched
@triton.jit
def _solve(
    p: tl.tensor, products: tl.tensor, following: tl.tensor, triangles: tl.tensor, table: tl.tensor,
    RANKS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """A basis to the rounding that the condition allows, and its products; NaN for those of what Cholesky cannot do."""
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    triangle = triangles + tl.program_id(0).to(tl.int64) * RANKS * RANKS
    gram = _sum_products(products, task, RANKS)
    lengths = _lengths(gram, RANKS)
    if tl.sum(lengths, 0) == 0:
        _write_axes(p, task, RANKS, ROWS)  # in place of zeros, as of parameters that are not used
        _write_products(p, following, task, RANKS, STEP)
    elif _triangle(_scaled(gram, lengths), triangle, tl.load(task + 2), LEAST_FIRST, RANKS):
        _divide(p, lengths, triangle, task, RANKS, ROWS)
        _write_products(p, following, task, RANKS, STEP)
    else:
        _write_square(following, tl.full([RANKS, RANKS], float("nan"), tl.float64), RANKS)


@launched
@triton.jit
def _refine(
    p: tl.tensor, products: tl.tensor, triangles: tl.tensor, table: tl.tensor,
    RANKS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """The same again: orthonormal to rounding; or Gram-Schmidt by the program of a factor's first chunk."""
    task = table + tl.program_id(0).to(tl.int64) * FIELDS
    triangle = triangles + tl.program_id(0).to(tl.int64) * RANKS * RANKS
    gram = _sum_products(products, task, RANKS)
    lengths = _lengths(gram, RANKS)
    if _triangle(_scaled(gram, lengths), triangle, tl.load(task + 2), LEAST_SECOND, RANKS):
        _divide(p, lengths, triangle, task, RANKS, ROWS)
    elif tl.load(task + 5) == 0:
        _repair(p, task, RANKS, TILE)


@launched
@triton.jit
def _repair_all(p: tl.tensor, table: tl.tensor, RANKS: tl.constexpr, TILE: tl.constexpr) -> None:
    _repair(p, table + tl.program_id(0).to(tl.int64) * FIELDS, RANKS, TILE)


@triton.jit
def _repair(p: tl.tensor, task: tl.tensor, RANKS: tl.constexpr, TILE: tl.constexpr) -> None:
    gram_schmidt(p + tl.load(task), tl.load(task + 1).to(tl.int32), tl.load(task + 2).to(tl.int32), RANKS, TILE)


@triton.jit
def _write_square(squares: tl.tensor, numbers: tl.tensor, RANKS: tl.constexpr) -> None:
    """(RANKS, RANKS) numbers of this program's chunk."""
    place = tl.arange(0, RANKS)[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
    tl.store(squares + tl.program_id(0).to(tl.int64) * RANKS * RANKS + place, numbers)


@triton.jit
def _write_products(
    p: tl.tensor, products: tl.tensor, task: tl.tensor, RANKS: tl.constexpr, STEP: tl.constexpr
) -> None:
    """The products of all pairs of vectors over the chunk's rows."""
    p += tl.load(task)
    rows = tl.load(task + 1)
    rank = tl.load(task + 2)
    end = tl.load(task + 6)
    left = tl.arange(0, RANKS)[:, None, None]
    right = tl.arange(0, RANKS)[None, :, None]
    sums = tl.zeros([RANKS, RANKS, STEP], tl.float64)
    for start in range(tl.load(task + 5), end, STEP):
        row = start + tl.arange(0, STEP)[None, None, :]
        lefts = tl.load(p + left * rows + row, mask=(left < rank) & (row < end), other=0).to(tl.float64)
        rights = tl.load(p + right * rows + row, mask=(right < rank) & (row < end), other=0).to(tl.float64)
        sums += lefts * rights
    _write_square(products, tl.sum(sums, 2), RANKS)


@triton.jit
def _sum_products(products: tl.tensor, task: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """The Gram matrix: the sums of all chunks of the factor, in order."""
    place = tl.arange(0, RANKS)[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
    part = products + tl.load(task + 3) * RANKS * RANKS + place
    gram = tl.zeros([RANKS, RANKS], tl.float64)
    for chunk in tl.range(0, tl.load(task + 4), loop_unroll_factor=4):
        gram += tl.load(part + chunk * RANKS * RANKS)
    return gram


@triton.jit
def _lengths(gram: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """Return the lengths of the vectors (RANKS)."""
    same = tl.arange(0, RANKS)[:, None] == tl.arange(0, RANKS)[None, :]
    return tl.sqrt(tl.sum(tl.where(same, gram, 0.0), 1))


@triton.jit
def _scaled(gram: tl.tensor, lengths: tl.tensor) -> tl.tensor:
    """The Gram matrix of the vectors at length 1."""
    lengths = tl.where(lengths == 0, 1.0, lengths)
    return gram / (lengths[:, None] * lengths[None, :])


@triton.jit
def _triangle(
    gram: tl.tensor, triangle: tl.tensor, rank: tl.tensor, least: tl.constexpr, RANKS: tl.constexpr
) -> tl.tensor:
    """Cholesky's R of a Gram matrix of vectors of length 1, with its diagonal inverted; whether all pivots were good."""
    row = tl.arange(0, RANKS)[:, None]
    column = tl.arange(0, RANKS)[None, :]
    good = tl.full([1, 1], 1, tl.int32)
    for pivot in range(0, rank):
        entries = tl.sum(tl.where(row == pivot, gram, 0.0), 0)[None, :]
        mirrored = tl.sum(tl.where(column == pivot, gram, 0.0), 1)[:, None]
        square = tl.sum(tl.where(column == pivot, entries, 0.0), 1)[:, None]
        good = tl.where(square > least, good, 0)
        square = tl.where(square > least, square, 1.0)
        inverse = 1 / tl.sqrt(square)
        shares = tl.where(column == pivot, inverse, entries * inverse)
        tl.store(triangle + pivot * RANKS + column, shares.to(tl.float32), mask=column >= pivot)
        gram -= tl.where((row > pivot) & (column > pivot), mirrored * entries / square, 0.0)
    tl.debug_barrier()  # what one thread has stored another loads
    return tl.sum(tl.sum(good, 1), 0) == 1


@triton.jit
def _divide(
    p: tl.tensor, lengths: tl.tensor, triangle: tl.tensor, task: tl.tensor, RANKS: tl.constexpr, ROWS: tl.constexpr
) -> None:
    """`P R^-1` in place of the chunk's rows of P: by substitution, which rounds relative to P whatever the condition."""
    p += tl.load(task)
    rows = tl.load(task + 1)
    rank = tl.load(task + 2).to(tl.int32)
    end = tl.load(task + 6)
    vector = tl.arange(0, RANKS)[:, None]
    length = tl.where(lengths == 0, 1.0, lengths)[:, None]
    for start in range(tl.load(task + 5), end, ROWS):
        row = start + tl.arange(0, ROWS)[None, :]
        inside = (vector < rank) & (row < end)
        numbers = (tl.load(p + vector * rows + row, mask=inside, other=0) / length).to(tl.float32)
        for pivot in range(0, rank):
            own = tl.sum(tl.where(vector == pivot, numbers, 0.0), 0)[None, :]
            own *= tl.load(triangle + pivot * RANKS + pivot)
            shares = tl.load(triangle + pivot * RANKS + vector, mask=vector > pivot, other=0)
            numbers = tl.where(vector == pivot, own, numbers - shares * own)
        tl.store(p + vector * rows + row, numbers, mask=inside)
    tl.debug_barrier()


@triton.jit
def _write_axes(p: tl.tensor, task: tl.tensor, RANKS: tl.constexpr, ROWS: tl.constexpr) -> None:
    """The first unit vectors, the chunk's rows of them."""
    rows = tl.load(task + 1)
    end = tl.load(task + 6)
    vector = tl.arange(0, RANKS)[:, None]
    for start in range(tl.load(task + 5), end, ROWS):
        row = start + tl.arange(0, ROWS)[None, :]
        inside = (vector < tl.load(task + 2)) & (row < end)
        tl.store(p + tl.load(task) + vector * rows + row, (row == vector).to(tl.float32), mask=inside)
    tl.debug_barrier()


@launched
@triton.jit
def _normalize(q: tl.tensor, previous: tl.tensor, table: tl.tensor, TILE: tl.constexpr) -> None:
    entry = table + tl.program_id(0).to(tl.int64) * 2
    first = tl.load(entry)
    size = tl.load(entry + 1)
    q += first
    previous += first
    largest = tl.zeros([TILE], tl.float32)
    for start in range(0, size, TILE):
        place = start + tl.arange(0, TILE)
        largest = tl.maximum(largest, tl.abs(tl.load(q + place, mask=place < size, other=0)))
    scale = tl.max(largest, 0)
    scale = tl.where(scale == 0, 1.0, scale)
    squares = tl.zeros([TILE], tl.float32)
    for start in range(0, size, TILE):
        place = start + tl.arange(0, TILE)
        numbers = tl.div_rn(tl.load(q + place, mask=place < size, other=0), scale)
        squares += numbers * numbers
    length = tl.sqrt_rn(tl.sum(squares, 0))
    for start in range(0, size, TILE):
        place = start + tl.arange(0, TILE)
        if length == 0:
            numbers = tl.load(previous + place, mask=place < size, other=0)
        else:
            numbers = tl.load(q + place, mask=place < size, other=0)
            numbers = tl.div_rn(tl.div_rn(numbers, scale), length)
        tl.store(q + place, numbers, mask=place < size)
