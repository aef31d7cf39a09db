"""The mean of sparse rows, voter after voter, so that no two add to one element at a time.

Where indices ascend, a program has a tile of the output: it finds the pairs of each voter that belong there by bisection,
and its own zeros and sums stay in the cache until they are all there. One launch, 4 bytes an element and the pairs.
In any order each voter takes a launch, whose pairs lie anywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launching import divided, launched, on_device, options, power_of_two, tile
from .tiles import store_tile

TILE = 8192  # elements of a program; shorter rows are not worth one
CHUNK = tile(128, interpreted=4096)  # pairs of a voter that it adds at a time: at 1 %, most of those in a tile
ALIGNED = 16  # elements
PAIRS = tile(1024, interpreted=4096)  # of a program where they are in any order


def scatter_mean(indices: Tensor, values: Tensor, out: Tensor, length: int, ascending: bool = False) -> None:
    """The mean over voters of sparse rows."""
    if not out.numel():
        return
    if not values.numel():
        out.zero_()
        return
    with on_device(out):
        scatter = _by_tiles if ascending and length >= TILE else _by_voters
        scatter(indices, values, out, length)


def _by_tiles(indices: Tensor, values: Tensor, out: Tensor, length: int) -> None:
    voters, rows, k = values.shape
    if out.numel() <= length:
        length = divided(length, ALIGNED) * ALIGNED  # of a single row any will do, and of these the kernel knows
    tiles = divided(length, TILE)
    _scatter_tile[(divided(out.numel(), length) * tiles,)](
        indices, values, out, *indices.stride()[:2], *values.stride()[:2],
        voters, rows, k, power_of_two(k), length, out.numel(), tiles, 1 / voters,
        VOTERS=power_of_two(voters), TILE=TILE, CHUNK=CHUNK, **options(4),
    )  # fmt: skip


def _by_voters(indices: Tensor, values: Tensor, out: Tensor, length: int) -> None:
    voters, rows, k = values.shape
    out.zero_()
    strides = (indices.stride(1), values.stride(1))
    for voter in range(voters):
        _scatter[(divided(rows * k, PAIRS),)](
            indices[voter], values[voter], out, *strides, rows * k, k, length, out.numel(), 1 / voters,
            PAIRS=PAIRS, **options(4),
        )  # fmt: skip


@triton.jit
def _bisect(indices: tl.tensor, keys: tl.tensor, inside: tl.tensor, count: tl.tensor, widest: tl.tensor) -> tl.tensor:
    """Count the indices below its key in each ascending list of `count` indices, for all lists at once."""
    below = keys * 0
    step = widest
    while step > 0:
        trial = below + step
        reached = inside & (trial <= count)
        index = tl.load(indices + (trial - 1), mask=reached, other=0).to(tl.int64)
        below = tl.where(reached & (index < keys), trial, below)
        step = step // 2
    return below


@launched
@triton.jit(do_not_specialize=["voters", "rows", "k", "widest", "size", "tiles", "share"])
def _scatter_tile(
    indices: tl.tensor, values: tl.tensor, out: tl.tensor,
    voter_indices: tl.int64, index_stride: tl.int64, voter_values: tl.int64, value_stride: tl.int64,
    voters: tl.int64, rows: tl.int64, k: tl.int64, widest: tl.int64,
    length: tl.int64, size: tl.int64, tiles: tl.int64, share: tl.float32,
    VOTERS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    begin = (program - row * tiles) * TILE
    elements = tl.minimum(size - row * length, length)
    end = tl.minimum(begin + TILE, elements)
    out += row * length
    if begin + TILE <= elements:
        store_tile(out, begin + tl.arange(0, TILE), tl.zeros([TILE], tl.float32), end, True)
    else:
        store_tile(out, begin + tl.arange(0, TILE), tl.zeros([TILE], tl.float32), end, False)
    count = tl.where(row < rows, tl.minimum(k, elements), 0)  # what is behind stands for nothing
    list_of = tl.arange(0, 2 * VOTERS)  # of each voter two keys, where the tile begins and ends
    voter_of = list_of // 2
    keys = tl.where(list_of % 2 == 0, begin, end)
    places = _bisect(indices + row * index_stride + voter_of * voter_indices, keys, voter_of < voters, count, widest)
    for voter in range(voters):
        first = tl.sum(tl.where(list_of == 2 * voter, places, 0), 0)
        last = tl.sum(tl.where(list_of == 2 * voter + 1, places, 0), 0)
        tl.debug_barrier()  # zeros, and what the voter before has added, are seen by all threads
        for start in range(first, last, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            index = tl.load(indices + row * index_stride + voter * voter_indices + pair, mask=pair < last, other=0)
            value = tl.load(values + row * value_stride + voter * voter_values + pair, mask=pair < last, other=0)
            inside = (pair < last) & (index >= begin) & (index < end)
            before = tl.load(out + index, mask=inside, other=0)
            tl.store(out + index, before + value.to(tl.float32) * share, mask=inside)


@launched
@triton.jit(do_not_specialize=["index_stride", "value_stride", "pairs", "k", "length", "size", "share"])
def _scatter(
    indices: tl.tensor, values: tl.tensor, out: tl.tensor, index_stride: tl.int64, value_stride: tl.int64,
    pairs: tl.int64, k: tl.int64, length: tl.int64, size: tl.int64, share: tl.float32, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    row = pair // k
    column = pair - row * k
    inside = pair < pairs
    index = tl.load(indices + row * index_stride + column, mask=inside, other=0).to(tl.int64)
    value = tl.load(values + row * value_stride + column, mask=inside, other=0).to(tl.float32)
    place = row * length + index
    # Zeros are skipped: what pads a row would race with the element of index 0.
    inside = inside & (value != 0) & (index >= 0) & (place < size)
    before = tl.load(out + place, mask=inside, other=0)
    tl.store(out + place, before + value * share, mask=inside)
