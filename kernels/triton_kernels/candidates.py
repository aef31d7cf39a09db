"""The first two passes over long rows: a sample, and the candidates that it points to.

The steps hand on what they find in two tables on the device. `state`, of each row: how many candidates were gathered, the
magnitude from which they were, the digits found so far of the k-th largest magnitude (at last all of it), how many are
still to take among those that share these digits (at last: that equal it), and a histogram for each digit. `tiles`, of each
tile of a row: where its candidates begin in the list, their number, and then where its first selected element goes and how
many elements before it equal the k-th largest. A candidate is one int64: its place in the tile above its float32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launching import launched
from .ranking import magnitude
from .tiles import load_tile, store_tile

GATHERED = tl.constexpr(0)  # columns of `state`
FLOOR = tl.constexpr(1)
DIGITS = tl.constexpr(2)
TO_TAKE = tl.constexpr(3)
HISTOGRAMS = tl.constexpr(4)
BINS = tl.constexpr(2048)  # the last one collects what does not count
STATE = tl.constexpr(4 + 3 * 2048)
FIRST_SHIFT = tl.constexpr(20)  # digits of 11, 10 and 10 bits
SHIFT = tl.constexpr(10)
DIGIT = tl.constexpr(1023)
FIELDS = tl.constexpr(4)  # columns of `tiles`


@triton.jit
def row_size(row: tl.tensor, length: tl.tensor, size: tl.tensor) -> tl.tensor:
    """Return the elements of a row; the last row may be shorter, those behind it are empty."""
    return tl.minimum(tl.maximum(size - row * length, 0), length)


@triton.jit
def has_spilled(state: tl.tensor, count: tl.tensor, k: tl.tensor, capacity: tl.tensor) -> tl.tensor:
    """Return True if the sample was wrong: the candidates do not fit or do not suffice."""
    gathered = tl.load(state + GATHERED)
    return (gathered > capacity) | (gathered < tl.minimum(count, k))


@launched
@triton.jit(do_not_specialize=["length", "size", "k", "capacity"])
def sample_rows(
    grad: tl.tensor, before: tl.tensor, state: tl.tensor,
    length: tl.int64, size: tl.int64, k: tl.int64, capacity: tl.int64, HELD: tl.constexpr, SAMPLES: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    count = row_size(row, length, size)
    index = tl.arange(0, SAMPLES).to(tl.int64)
    begin = index * count // SAMPLES
    width = (index + 1) * count // SAMPLES - begin
    scattered = (index * 40503) & 0xFFFF  # so that no period of the row hides from the sample
    places = begin + (width * scattered) // 65536
    numbers = load_tile(grad + row * length, places, count, False)
    if HELD:
        numbers += load_tile(before + row * length, places, count, False)
    keys = magnitude(numbers)
    expected = SAMPLES * tl.minimum(count, k).to(tl.float32) / tl.maximum(count, 1).to(tl.float32)
    rank = (expected + 4 * tl.sqrt(expected) + 16).to(tl.int32)  # four standard deviations more than needed
    floor = tl.zeros([], tl.int32)
    for step in range(15):  # the upper bits tell enough
        trial = floor | (1 << (30 - step))
        floor = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) >= rank, trial, floor)
    tl.store(state + row * STATE + FLOOR, floor.to(tl.int64))
    tl.store(state + row * STATE + TO_TAKE, tl.minimum(count, k))


@launched
@triton.jit(do_not_specialize=["size", "k", "capacity", "tiles"])
def gather_candidates(
    grad: tl.tensor, before: tl.tensor, vector: tl.tensor, state: tl.tensor, table: tl.tensor, candidates: tl.tensor,
    length: tl.int64, size: tl.int64, k: tl.int64, capacity: tl.int64, tiles: tl.int64,
    HELD: tl.constexpr, ONE_ROW: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if ONE_ROW:
        row = program * 0
        first = program * TILE
    else:
        row = program // tiles
        first = row * length + (program - row * tiles) * TILE
    end = row * length + row_size(row, length, size)
    state += row * STATE
    candidates += row * capacity
    entry = table + program * FIELDS
    if first + TILE <= end:
        _gather_tile(grad, before, vector, state, entry, candidates, first, end, capacity, HELD, TILE, True)
    else:
        _gather_tile(grad, before, vector, state, entry, candidates, first, end, capacity, HELD, TILE, False)


@triton.jit
def _gather_tile(
    grad: tl.tensor, before: tl.tensor, vector: tl.tensor, state: tl.tensor, entry: tl.tensor, candidates: tl.tensor,
    first: tl.tensor, end: tl.tensor, capacity: tl.tensor, HELD: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    local = tl.arange(0, TILE)
    numbers = load_tile(grad, first + local, end, WHOLE)
    if HELD:
        numbers += load_tile(before, first + local, end, WHOLE)
        store_tile(vector, first + local, numbers, end, WHOLE)
    kept = magnitude(numbers) >= tl.load(state + FLOOR).to(tl.int32)
    if not WHOLE:
        kept = kept & (first + local < end)
    ranks = tl.cumsum(kept.to(tl.int32), 0)
    count = tl.sum(kept.to(tl.int32), 0).to(tl.int64)
    # Which tile comes first in the list is left to chance, nothing that is written out depends on it.
    start = tl.atomic_add(state + GATHERED, count, sem="relaxed")
    room = tl.minimum(capacity - start, TILE).to(tl.int32)
    candidate = (local.to(tl.int64) << 32) | numbers.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(candidates + start + (ranks - 1), candidate, mask=kept & (ranks <= room))
    tl.store(entry, start)
    tl.store(entry + 1, count)


@triton.jit
def number_of(candidate: tl.tensor) -> tl.tensor:
    """The float32 of a candidate."""
    return candidate.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def place_of(candidate: tl.tensor) -> tl.tensor:
    """Return the place of a candidate in its tile."""
    return (candidate >> 32).to(tl.int32)
