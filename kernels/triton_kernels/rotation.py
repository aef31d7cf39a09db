"""Rotations of blocks: all sums and differences of a block while it lies in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..operands import Places
from .launching import divided, launched, on_device, options, tile

TILE = tile(1024, interpreted=4096)  # elements of a program, at least
ELEMENTS_PER_WARP = 1024


def rotate_blocks(values: Tensor, signs: Tensor, back: bool = False, places: Places | None = None) -> None:
    """Whole blocks, then what is left, in smaller powers of two: two launches at most. Blocks in their places: one."""
    block, size = signs.numel(), values.numel()
    each = max(1, TILE // block)
    constants = {
        "BLOCK": block, "LEVELS": block.bit_length() - 1, "EACH": each, "BACK": back,
        **options(max(1, each * block // ELEMENTS_PER_WARP)),
    }  # fmt: skip
    if places is not None:
        with on_device(values):
            _rotate_placed[(divided(places.blocks, each),)](
                values, signs, places.table, places.table.shape[0], places.stride, places.blocks, **constants
            )
        return
    count = size // (each * block)
    with on_device(values):
        for first, programs, whole in ((0, count, True), (count, divided(size, each * block) - count, False)):
            if programs:
                start = first * each * block
                _rotate[(programs,)](values[start:], signs, size - start, WHOLE=whole, **constants)


@launched
@triton.jit(do_not_specialize=["size"])
def _rotate(
    values: tl.tensor, signs: tl.tensor, size: tl.int64,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, EACH: tl.constexpr, BACK: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * (EACH * BLOCK)
    values, size = values + start, size - start
    first = tl.arange(0, EACH)[:, None] * BLOCK
    places, left = first + tl.arange(0, BLOCK)[None, :], size - first
    if WHOLE:
        tl.store(values + places, rotated(tl.load(values + places), signs, left, EACH, BLOCK, LEVELS, BACK, True))
    else:
        numbers = tl.load(values + places, mask=places < size, other=0)
        numbers = rotated(numbers, signs, left, EACH, BLOCK, LEVELS, BACK, False)
        tl.store(values + places, numbers, mask=places < size)


@launched
@triton.jit(do_not_specialize=["period", "stride", "blocks"])
def _rotate_placed(
    values: tl.tensor, signs: tl.tensor, table: tl.tensor, period: tl.int64, stride: tl.int64, blocks: tl.int64,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, EACH: tl.constexpr, BACK: tl.constexpr,
) -> None:  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    turn = number // period
    entry = table + 2 * (number - turn * period)
    first = tl.load(entry, mask=number < blocks, other=0) + turn * stride
    left = tl.load(entry + 1, mask=number < blocks, other=0)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    places = first[:, None] + lane
    numbers = tl.load(values + places, mask=lane < left, other=0)
    numbers = rotated(numbers, signs, left, EACH, BLOCK, LEVELS, BACK, False)
    tl.store(values + places, numbers, mask=lane < left)


@triton.jit
def rotated(
    numbers: tl.tensor, signs: tl.tensor, left: tl.tensor,
    EACH: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, BACK: tl.constexpr, WHOLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Blocks (EACH, BLOCK) by rotation, or back. `left`: (EACH, 1), elements from each one's first on; behind are zeros.

    Where not all blocks are WHOLE, each element is of a block of its own size, a power of two.
    """
    lane = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        sign, factor = tl.load(signs + lane), tl.sqrt_rn(tl.full([1, 1], 1.0 / BLOCK, tl.float32))
    else:
        left = tl.minimum(tl.maximum(left, 0), BLOCK).to(tl.int32)
        apart = tl.where(lane < left, lane ^ left, 0)  # its highest bit is the size
        place = apart  # of the last element of the block, and so the bits of places in it
        for shift in tl.static_range(4):
            place |= place >> (1 << shift)
        place = place >> 1
        sign, factor = tl.load(signs + (lane & place)), tl.sqrt_rn(1.0 / (place + 1).to(tl.float32))
    if not BACK:
        numbers *= sign
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(numbers, [EACH, BLOCK // (2 << level), 2, 1 << level])
        first, second = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
        pairs = tl.permute(tl.join(first + second, first - second), [0, 1, 3, 2])
        merged = tl.reshape(pairs, [EACH, BLOCK])
        numbers = merged if WHOLE else tl.where(apart >= 2 << level, merged, numbers)
    numbers *= factor
    if BACK:
        numbers *= sign
    return numbers


@triton.jit
def turned(
    numbers: tl.tensor, signs: tl.tensor, left: tl.tensor, LEVELS: tl.constexpr,
    UNITS: tl.constexpr, UNIT: tl.constexpr, PART: tl.constexpr, BACK: tl.constexpr, WHOLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Units (UNITS, UNIT / PART, PART) by rotation, each a block; the same numbers where there are no LEVELS.

    `left`: (UNITS, 1, 1), as for `rotated`.
    """
    if LEVELS == 0:
        return numbers
    else:
        flat, left = tl.reshape(numbers, [UNITS, UNIT]), tl.reshape(left, [UNITS, 1])
        return tl.reshape(rotated(flat, signs, left, UNITS, UNIT, LEVELS, BACK, WHOLE), [UNITS, UNIT // PART, PART])
