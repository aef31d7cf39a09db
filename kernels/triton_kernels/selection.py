"""Selection of the largest elements, exact and without waiting for the device.

Short rows lie in registers while they are searched. Of long rows a sample tells about where the k-th largest lies; one
pass over memory adds the residual and gathers the candidates from there on, and what follows reads candidates only. Where
the sample was wrong (they do not suffice or do not fit) the same kernels read the whole row instead: slower, as exact.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..operands import Residual
from .launching import divided, launched, on_device, options, power_of_two
from .long_rows import select_from_long_rows
from .ranking import chosen_of, magnitude, narrowed
from .tiles import load_tile, store_tile

SHORT = 4096  # elements of a row that a program holds


def select_largest(grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int) -> None:
    """The largest elements of each row, ascending; `residual` keeps the rest."""
    if not values.numel():
        if residual is not None:
            residual.plus(grad)
        return
    with on_device(grad):
        select = _select_from_short_rows if length <= SHORT else select_from_long_rows
        select(grad, residual, indices, values, length)


def _select_from_short_rows(
    grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int
) -> None:
    rows, k = values.shape
    width = power_of_two(length)
    each = max(1, SHORT // width)
    held = residual or Residual(grad, grad)
    _select_rows[(divided(rows, each),)](
        grad, *held, indices, values, indices.stride(0), values.stride(0), rows, k, length, grad.numel(),
        HELD=residual is not None, ROWS=each, WIDTH=width, **options(8),
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["index_stride", "value_stride", "rows", "k", "length", "size"])
def _select_rows(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, indices: tl.tensor, values: tl.tensor,
    index_stride: tl.int64, value_stride: tl.int64, rows: tl.int64, k: tl.int64, length: tl.int64, size: tl.int64,
    HELD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    first = row * length
    places = first[:, None] + column
    end = tl.where(row < rows, tl.minimum(first + length, size), 0)
    inside = places < end[:, None]
    numbers = load_tile(grad, places, end[:, None], False)
    if HELD:
        numbers += load_tile(before, places, end[:, None], False)
    wanted = tl.minimum(tl.maximum(end - first, 0), k).to(tl.int32)
    keys = tl.where(inside, magnitude(numbers), -1)
    threshold = tl.zeros([ROWS], tl.int32)
    for step in range(31):  # the largest number that so many keys reach, bit by bit
        trial = threshold | (1 << (30 - step))
        reached = tl.sum((keys >= trial[:, None]).to(tl.int32), 1)
        threshold = tl.where(reached >= wanted, trial, threshold)
    above = tl.sum((keys > threshold[:, None]).to(tl.int32), 1)
    chosen = chosen_of(keys, threshold[:, None], (wanted - above)[:, None])
    position = tl.cumsum(chosen.to(tl.int32), 1) - 1
    sent = narrowed(numbers, values.dtype.element_ty)
    tl.store(indices + row[:, None] * index_stride + position, column, mask=chosen)
    tl.store(values + row[:, None] * value_stride + position, sent, mask=chosen)
    if HELD:
        rest = tl.where(chosen, numbers - sent.to(tl.float32), numbers)
        store_tile(after, places, rest, end[:, None], False)
    for start in range(0, k, WIDTH):  # what a row is too short for
        slot = start + column
        empty = (slot >= wanted[:, None]) & (slot < k) & (row < rows)[:, None]
        tl.store(indices + row[:, None] * index_stride + slot, 0, mask=empty)
        tl.store(values + row[:, None] * value_stride + slot, 0, mask=empty)
