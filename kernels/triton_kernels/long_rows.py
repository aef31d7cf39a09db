"""Selection from rows that do not fit into a program: sample, gather candidates, rank them, write them in order."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operands import Residual
from .candidates import (
    BINS,
    DIGIT,
    DIGITS,
    FIELDS,
    FIRST_SHIFT,
    GATHERED,
    HISTOGRAMS,
    SHIFT,
    STATE,
    TO_TAKE,
    gather_candidates,
    has_spilled,
    number_of,
    place_of,
    row_size,
    sample_rows,
)
from .launching import divided, launched, multiprocessors, options, tile
from .ranking import chosen_of, magnitude, narrowed
from .tiles import load_tile

ROWS_AT_ONCE = 256  # bounds the histograms
SAMPLES = 4096
TILE = 4096
CHUNK = tile(256, interpreted=4096)  # of candidates of a tile, which are few
SPARE = 16384  # candidates
NUMBERED = 4096  # tiles at a time; one program of a row goes through all of them, each time it waits for memory


def select_from_long_rows(
    grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int
) -> None:
    """Exactly the k largest elements of each row, the lower index first among equals."""
    rows, k = values.shape
    if rows > ROWS_AT_ONCE:
        for first in range(0, rows, ROWS_AT_ONCE):
            part, end = slice(first * length, (first + ROWS_AT_ONCE) * length), first + ROWS_AT_ONCE
            held = residual and Residual(residual.before[part], residual.after[part])
            select_from_long_rows(grad[part], held, indices[first:end], values[first:end], length)
        return
    short = max(0, grad.numel() - k + length) // length if k <= length else 0  # rows from here on have less than k
    indices[short:].zero_()
    values[short:].zero_()
    if grad.numel():
        _launch(grad, residual, indices, values, length)


def _capacity(length: int, k: int) -> int:
    """Room for twice the candidates that are to be expected, as `sample_rows` aims at."""
    expected = SAMPLES * min(k, length) / length
    return min(length, math.ceil(2 * (expected + 4 * math.sqrt(expected) + 16) / SAMPLES * length) + SPARE)


def _launch(grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int) -> None:
    rows, k = values.shape
    tiles, capacity, device = divided(length, TILE), _capacity(length, k), grad.device
    state = torch.zeros(rows, STATE.value, dtype=torch.int64, device=device)
    table = torch.empty(rows, tiles, FIELDS.value, dtype=torch.int64, device=device)
    candidates = torch.empty(rows, capacity, dtype=torch.int64, device=device)
    held, sizes = residual is not None, (length, grad.numel(), k, capacity)
    before, vector = residual or (grad, grad)
    by_tile, by_row, one = (rows * tiles,), (rows,), rows == 1
    counters = min(tiles, divided(2 * multiprocessors(device), rows))
    sample_rows[by_row](grad, before, state, *sizes, HELD=held, SAMPLES=SAMPLES, **options(8))
    gather_candidates[by_tile](
        grad, before, vector, state, table, candidates, *sizes, tiles, HELD=held, ONE_ROW=one, TILE=TILE, **options(8)
    )
    for level in range(3):
        _count[(rows * counters,)](vector, state, candidates, *sizes, counters, LEVEL=level, CHUNK=TILE, **options(8))
        _resolve[by_row](state, LEVEL=level, **options(4))
    _tally[by_tile](vector, state, table, candidates, *sizes, tiles, TILE=TILE, CHUNK=CHUNK, **options(1))
    _number_tiles[by_row](state, table, tiles, CHUNK=NUMBERED, **options(8))
    _write[by_tile](
        vector, state, table, candidates, indices, values, indices.stride(0), values.stride(0), *sizes, tiles,
        HELD=held, TILE=TILE, CHUNK=CHUNK, **options(1),
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["length", "size", "k", "capacity", "counters"])
def _count(
    vector: tl.tensor, state: tl.tensor, candidates: tl.tensor,
    length: tl.int64, size: tl.int64, k: tl.int64, capacity: tl.int64, counters: tl.int64,
    LEVEL: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // counters
    count = row_size(row, length, size)
    state += row * STATE
    spilled = has_spilled(state, count, k, capacity)
    digits = tl.load(state + DIGITS).to(tl.int32)
    total = tl.where(spilled, count, tl.load(state + GATHERED))
    histogram = tl.zeros([BINS], tl.int32)
    for start in range((program - row * counters) * CHUNK, total, counters * CHUNK):
        place = start + tl.arange(0, CHUNK)
        if spilled:
            found = load_tile(vector + row * length, place, total, False)
        else:
            found = number_of(tl.load(candidates + row * capacity + place, mask=place < total, other=0))
        keys = magnitude(found)
        if LEVEL == 0:
            digit = keys >> FIRST_SHIFT
            counts = place < total
        else:
            digit = (keys >> (FIRST_SHIFT - LEVEL * SHIFT)) & DIGIT
            counts = (place < total) & (keys >> (FIRST_SHIFT - (LEVEL - 1) * SHIFT) == digits)
        histogram += tl.histogram(tl.where(counts, digit, BINS - 1), BINS)
    bins = tl.arange(0, BINS)
    counted = (histogram > 0) & (bins < BINS - 1)
    tl.atomic_add(state + HISTOGRAMS + LEVEL * BINS + bins, histogram.to(tl.int64), mask=counted, sem="relaxed")


@launched
@triton.jit
def _resolve(state: tl.tensor, LEVEL: tl.constexpr) -> None:
    """One more digit of the k-th largest magnitude, and how many are still to take among those that share it."""
    state += tl.program_id(0).to(tl.int64) * STATE
    bins = tl.arange(0, BINS)
    counts = tl.load(state + HISTOGRAMS + LEVEL * BINS + bins)
    to_take = tl.load(state + TO_TAKE)
    from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.max(tl.where(from_here >= to_take, bins, 0), 0)
    tl.store(state + DIGITS, (tl.load(state + DIGITS) << SHIFT) + digit)
    tl.store(state + TO_TAKE, to_take - tl.sum(tl.where(bins > digit, counts, 0), 0))


@triton.jit
def _elements_of_tile(
    vector: tl.tensor, candidates: tl.tensor, first: tl.tensor, spilled: tl.tensor,
    start: tl.tensor, width: tl.tensor, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Some candidates of a tile, or elements where they spilled: (1, CHUNK) numbers, places in the tile, ranking keys."""
    index = (start + tl.arange(0, CHUNK))[None, :]
    if spilled:
        found = load_tile(vector + first, index, width, False)
        local = index.to(tl.int32)
    else:
        candidate = tl.load(candidates + index, mask=index < width, other=0)
        found = number_of(candidate)
        local = place_of(candidate)
    return found, local, tl.where(index < width, magnitude(found), -1)


@launched
@triton.jit(do_not_specialize=["length", "size", "k", "capacity", "tiles"])
def _tally(
    vector: tl.tensor, state: tl.tensor, table: tl.tensor, candidates: tl.tensor,
    length: tl.int64, size: tl.int64, k: tl.int64, capacity: tl.int64, tiles: tl.int64,
    TILE: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Above the k-th largest magnitude and equal to it: how many elements of each tile."""
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    before = (program - row * tiles) * TILE
    count = row_size(row, length, size)
    spilled = has_spilled(state + row * STATE, count, k, capacity)
    threshold = tl.load(state + row * STATE + DIGITS).to(tl.int32)
    entry = table + program * FIELDS
    segment = row * capacity + tl.where(spilled, 0, tl.load(entry))
    width = tl.where(spilled, tl.minimum(count - before, TILE), tl.load(entry + 1))
    above = tl.zeros([1, CHUNK], tl.int32)
    equal = tl.zeros([1, CHUNK], tl.int32)
    for start in range(0, width, CHUNK):
        _found, _local, keys = _elements_of_tile(
            vector, candidates + segment, row * length + before, spilled, start, width, CHUNK
        )
        above += (keys > threshold).to(tl.int32)
        equal += (keys == threshold).to(tl.int32)
    tl.store(entry + 2, tl.sum(tl.sum(above, 1), 0).to(tl.int64))
    tl.store(entry + 3, tl.sum(tl.sum(equal, 1), 0).to(tl.int64))


@launched
@triton.jit(do_not_specialize=["tiles"])
def _number_tiles(state: tl.tensor, table: tl.tensor, tiles: tl.int64, CHUNK: tl.constexpr) -> None:
    """Running sums over the tiles of a row: of what is selected, and of what equals the k-th largest magnitude."""
    row = tl.program_id(0).to(tl.int64)
    to_take = tl.load(state + row * STATE + TO_TAKE)
    selected = tl.zeros([], tl.int64)
    equals = tl.zeros([], tl.int64)
    for start in range(0, tiles, CHUNK):
        index = start + tl.arange(0, CHUNK)
        entries = table + (row * tiles + index) * FIELDS
        above = tl.load(entries + 2, mask=index < tiles, other=0)
        equal = tl.load(entries + 3, mask=index < tiles, other=0)
        equal_before = equals + tl.cumsum(equal, 0) - equal
        taken = above + tl.minimum(tl.maximum(to_take - equal_before, 0), equal)
        tl.store(entries + 2, selected + tl.cumsum(taken, 0) - taken, mask=index < tiles)
        tl.store(entries + 3, equal_before, mask=index < tiles)
        selected += tl.sum(taken, 0)
        equals += tl.sum(equal, 0)


@launched
@triton.jit(do_not_specialize=["index_stride", "value_stride", "length", "size", "k", "capacity", "tiles"])
def _write(
    vector: tl.tensor, state: tl.tensor, table: tl.tensor, candidates: tl.tensor,
    indices: tl.tensor, values: tl.tensor, index_stride: tl.int64, value_stride: tl.int64,
    length: tl.int64, size: tl.int64, k: tl.int64, capacity: tl.int64, tiles: tl.int64,
    HELD: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    before = (program - row * tiles) * TILE
    count = row_size(row, length, size)
    spilled = has_spilled(state + row * STATE, count, k, capacity)
    threshold = tl.load(state + row * STATE + DIGITS).to(tl.int32)
    entry = table + program * FIELDS
    segment = row * capacity + tl.where(spilled, 0, tl.load(entry))
    width = tl.where(spilled, tl.minimum(count - before, TILE), tl.load(entry + 1))
    next_place = tl.load(entry + 2)
    ties = tl.load(state + row * STATE + TO_TAKE) - tl.load(entry + 3)
    for start in range(0, width, CHUNK):
        found, local, keys = _elements_of_tile(
            vector, candidates + segment, row * length + before, spilled, start, width, CHUNK
        )
        chosen = chosen_of(keys, threshold, ties)
        position = next_place + tl.cumsum(chosen.to(tl.int32), 1) - 1
        sent = narrowed(found, values.dtype.element_ty)
        tl.store(indices + row * index_stride + position, before + local, mask=chosen)
        tl.store(values + row * value_stride + position, sent, mask=chosen)
        if HELD:
            tl.store(vector + row * length + before + local, found - sent.to(tl.float32), mask=chosen)
        next_place += tl.sum(tl.sum(chosen.to(tl.int64), 1), 0)
        ties -= tl.sum(tl.sum((keys == threshold).to(tl.int64), 1), 0)
