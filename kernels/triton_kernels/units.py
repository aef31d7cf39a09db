"""Blocks of elements that share a scale, cut into units for the programs of a kernel.

A unit has a power of two elements. A program takes several where they are small; a block that is large has several.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..operands import Places
from . import LARGEST_BLOCK
from .launching import divided, options, power_of_two, tile
from .tiles import told

TILE = tile(1024, interpreted=4096)  # elements of a program, at least
LARGEST_UNIT = LARGEST_BLOCK
UNIT = 4096  # of larger blocks
ELEMENTS_PER_WARP = 1024  # a program of one warp needs no barrier
ROTATED_PER_WARP, MOST_WARPS = 256, 16  # or a thread has more numbers than registers, and compilers take seconds


@dataclass(frozen=True)
class Units:
    """The cut of blocks of `block` elements: `count` units of up to `unit` elements, `each` to a block."""

    block: int
    unit: int
    each: int
    count: int

    @functools.cached_property
    def programs(self) -> tuple[int]:
        """The grid."""
        return (divided(self.count, self.sizes["UNITS"]),)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The constants of the kernels for a program, and the warps."""
        units = max(1, TILE // self.unit)
        exact = self.block % self.unit == 0
        warps = max(1, units * self.unit // ELEMENTS_PER_WARP)
        return {"EACH": self.each, "UNITS": units, "UNIT": self.unit, "EXACT": exact, **options(warps)}

    @functools.cached_property
    def unrotated_sizes(self) -> dict[str, int]:
        """The same for kernels that rotate blocks, in so many `LEVELS`: here in none."""
        return {**self.sizes, "LEVELS": 0}

    @functools.cached_property
    def rotated_sizes(self) -> dict[str, int]:
        """The same where each unit is a block that is rotated."""
        warps = max(1, min(MOST_WARPS, self.sizes["UNITS"] * self.unit // ROTATED_PER_WARP))
        return {**self.sizes, "LEVELS": self.block.bit_length() - 1, **options(warps)}

    def rotated_by(self, signs: Tensor | None) -> dict[str, int]:
        """Return the constants of a kernel that rotates blocks by `signs`, where there are any."""
        return self.unrotated_sizes if signs is None else self.rotated_sizes


def placed(places: Places | None, other: Tensor) -> tuple[tuple[Tensor, int, int], dict[str, bool]]:
    """Return the table of places, its blocks and stride, and the constants of kernels. `other`: where there is none."""
    if places is None:
        return (other, 1, 0), {"PLACED": False, "ALIGNED": False}
    return (places.table, places.table.shape[0], places.stride), {"PLACED": True, "ALIGNED": places.aligned}


@functools.lru_cache(maxsize=1024)
def cut(blocks: int, block: int) -> Units:
    """The units of so many blocks of so many elements."""
    unit = power_of_two(block) if block <= LARGEST_UNIT else UNIT
    each = divided(block, unit)
    return Units(block, unit, each, blocks * each)


@triton.jit
def unit_places(
    blocks: tl.tensor, block: tl.tensor, EACH: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """Return the numbers of a program's units, their rows, blocks within the row, first elements, and those left."""
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    group = unit // EACH
    skipped = (unit - group * EACH) * UNIT
    row = group // blocks
    first = group * (block // 8) * 8 + skipped  # so that the compiler sees the alignment
    return unit, row, group - row * blocks, first, block - skipped


@triton.jit
def vector_places(
    table: tl.tensor, period: tl.tensor, stride: tl.tensor, unit: tl.tensor, place: tl.tensor, left: tl.tensor,
    units: tl.tensor, size: tl.tensor, PLACED: tl.constexpr, ALIGNED: tl.constexpr, EACH: tl.constexpr, UNIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the first element of each unit in the vector, and the end of its block there; 0 for what is no unit.

    `place`, `left`: the same in the payload, where blocks lie one behind the other.
    """
    if PLACED:
        group = unit // EACH
        turn, skipped = group // period, (unit - group * EACH) * UNIT
        entry = table + 2 * (group - turn * period)
        start = tl.load(entry, mask=unit < units, other=0) + turn * stride
        end = start + tl.load(entry + 1, mask=unit < units, other=0)
        return told(start + skipped, ALIGNED), end
    else:
        return place, tl.where(unit < units, tl.minimum(place + left, size), 0)


@triton.jit
def place_in_row(row: tl.tensor, first: tl.tensor, blocks: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Return the places of elements in their rows; a multiple of 8 to the compiler where `first` is one."""
    return first - row * blocks * (block // 8) * 8


@triton.jit
def is_whole(
    table: tl.tensor, period: tl.tensor, units: tl.tensor, size: tl.tensor,
    PLACED: tl.constexpr, EACH: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return True if all lanes of the program's units are elements of the vector."""
    first = tl.program_id(0).to(tl.int64) * UNITS
    if PLACED:
        unit = first + tl.arange(0, UNITS)
        group = unit // EACH
        count = tl.load(table + 2 * (group % period) + 1, mask=unit < units, other=0)
        return EXACT & (tl.min(count - (unit - group * EACH) * UNIT, 0) >= UNIT)
    else:
        return EXACT & (first + UNITS <= units) & ((first + UNITS) * UNIT <= size)
