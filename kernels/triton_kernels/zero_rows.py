"""Rows of parameters, by a table of the programs' pieces: one launch for a bucket, whatever it is made of."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operands import Block, Rows
from .launching import launched, on_device, options, tile
from .tasks import table_of

TILE = tile(4096, interpreted=16_384)  # elements of a program
FIELDS = tl.constexpr(5)  # of a piece: see `_pieces`


def mark_rows(values: Tensor, used: Tensor, rows: Rows) -> None:
    """Each program marks the rows of its piece; whoever writes writes the same. Of marked rows nothing is read."""
    _launch(_mark, values, used, rows)


def clear_rows(values: Tensor, used: Tensor, rows: Rows) -> None:
    """Nothing is read of the values, and nothing written where all rows of a piece are used."""
    _launch(_clear, values, used, rows)


def _launch(kernel: triton.JITFunction, values: Tensor, used: Tensor, rows: Rows) -> None:
    table = _table(rows, values.device)
    if programs := table.shape[0]:
        with on_device(values):
            kernel[(programs,)](values, used.view(torch.uint8), table, TILE=TILE, **options(8))


@functools.lru_cache(maxsize=1024)
def _table(rows: Rows, device: torch.device) -> Tensor:
    """The pieces of rows on a device; where it is new to them, the host waits for the copy."""
    return table_of([piece for block in rows.blocks for piece in _pieces(block)], device)


def _pieces(block: Block) -> Iterator[tuple[int, int, int, int, int]]:
    """(first element, elements, row of the first one, its place in the row, elements of a row) of each program's piece.

    Where a piece lies in one row, that row counts as long as a tile, so that 32 bits hold all places.
    """
    for first in range(0, block.rows * block.size, TILE):
        count = min(TILE, block.rows * block.size - first)
        row, place = divmod(first, block.size)
        inside = place + count <= block.size
        yield block.start + first, count, block.number + row, 0 if inside else place, TILE if inside else block.size


@triton.jit
def _piece(table: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return the places of a piece's elements, whether they are there, and their rows."""
    fields = table + tl.program_id(0) * FIELDS
    lane = tl.arange(0, TILE)
    count, place, size = tl.load(fields + 1), tl.load(fields + 3).to(tl.int32), tl.load(fields + 4).to(tl.int32)
    return tl.load(fields) + lane, lane < count, tl.load(fields + 2) + (place + lane) // size


@launched
@triton.jit
def _mark(values: tl.tensor, used: tl.tensor, table: tl.tensor, TILE: tl.constexpr) -> None:
    places, there, row = _piece(table, TILE)
    unknown = there & (tl.load(used + row, mask=there, other=1) == 0)
    numbers = tl.load(values + places, mask=unknown, other=0).to(tl.float32)  # the interpreter compares bf16 as bits
    tl.store(used + row, 1, mask=unknown & (numbers != 0))


@launched
@triton.jit
def _clear(values: tl.tensor, used: tl.tensor, table: tl.tensor, TILE: tl.constexpr) -> None:
    places, there, row = _piece(table, TILE)
    marked = tl.load(used + row, mask=there, other=1)
    tl.store(values + places, 0.0, mask=there & (marked == 0))
