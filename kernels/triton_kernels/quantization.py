"""Payloads of 8, 4 and 2 bits: scale, codes and residual of a block while it lies in registers, and the mean in one pass.

Codes lie in their bytes as kernels/quantization.py says.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..operands import Places, Residual
from ..quantization import FORMATS, steps_of
from .launching import launched, on_device
from .rotation import turned
from .tiles import load_tile, store_mean, store_tile
from .units import cut, is_whole, place_in_row, placed, unit_places, vector_places


def quantize_blocks(
    grad: Tensor,
    residual: Residual | None,
    scales: Tensor,
    codes: Tensor,
    length: int,
    bits: int = 8,
    signs: Tensor | None = None,
    seed: int = -1,
    counter: int = 0,
    places: Places | None = None,
) -> None:
    """Multiples of block scales, of numbers rotated by `signs`; `residual` keeps the rest."""
    rows, blocks = scales.shape
    limit, _, offset = FORMATS[bits]
    units = cut(rows * blocks, length // blocks)
    if not units.count:
        return
    place = (blocks, units.block, units.count, grad.numel())
    held, strides = residual or Residual(grad, grad), (scales.stride(0), codes.stride(0))
    steps = steps_of(bits, unbiased=seed >= 0 and residual is None)
    (table, *turns), where = placed(places, scales)
    with on_device(grad):
        _quantize[units.programs](
            grad, *held, scales, codes, grad if signs is None else signs, table, *strides, *turns, max(seed, 0), counter,
            *place,
            HELD=residual is not None, RANDOM=seed >= 0, BITS=bits, STEPS=steps, LIMIT=float(limit), OFFSET=offset,
            **where, **units.rotated_by(signs),
        )  # fmt: skip


def dequantize_mean(
    scales: Tensor,
    codes: Tensor,
    out: Tensor,
    bits: int = 8,
    residual: Tensor | None = None,
    signs: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """The mean over voters of `scale * code`, rotated back; what `out` rounds away is added to `residual`."""
    voters, rows, blocks = scales.shape
    units = cut(rows * blocks, codes.shape[2] * 8 // bits // blocks)
    if not units.count:
        return
    place = (blocks, units.block, units.count, out.numel())
    strides = (*scales.stride()[:2], *codes.stride()[:2])
    held = out if residual is None else residual
    (table, *turns), where = placed(places, scales)
    with on_device(out):
        _dequantize[units.programs](
            scales, codes, out, held, out if signs is None else signs, table, *strides, *turns, voters, 1 / voters, *place,
            HELD=residual is not None, BITS=bits, OFFSET=FORMATS[bits].offset,
            **where, **units.rotated_by(signs),
        )  # fmt: skip


@triton.jit
def _lanes(UNIT: tl.constexpr) -> tl.tensor:
    """The elements of a unit by fours, as many as a counter gives random words."""
    return tl.arange(0, UNIT // 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def _bytes(UNIT: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The bytes of a unit, by those of four elements."""
    return tl.arange(0, UNIT // 4)[None, :, None] * (BITS // 2) + tl.arange(0, BITS // 2)[None, None, :]


@triton.jit
def _packed(levels: tl.tensor, BITS: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Whole numbers (UNITS, UNIT / 4, 4) as bytes."""
    if BITS == 8:
        return levels.to(tl.int8)
    else:
        fields = levels.to(tl.int32) & ((1 << BITS) - 1)
        fields = tl.reshape(fields, [UNITS, UNIT // 4, BITS // 2, 8 // BITS])
        return tl.sum(fields << (tl.arange(0, 8 // BITS) * BITS)[None, None, None, :], 3).to(tl.int8)


@triton.jit
def _unpacked(codes: tl.tensor, BITS: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Return the codes that bytes stand for, (UNITS, UNIT / 4, 4)."""
    if BITS == 8:
        return codes.to(tl.float32)
    elif BITS == 4:
        fields = tl.join(_field(codes, 0, BITS), _field(codes, 4, BITS))
        return tl.reshape(fields, [UNITS, UNIT // 4, 4])
    else:
        even = tl.join(_field(codes, 0, BITS), _field(codes, 4, BITS))
        fields = tl.join(even, tl.join(_field(codes, 2, BITS), _field(codes, 6, BITS)))
        return tl.reshape(fields, [UNITS, UNIT // 4, 4])


@triton.jit
def _field(codes: tl.tensor, PLACE: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The numbers that begin with a bit of each byte."""
    return (codes.to(tl.int32) << (32 - BITS - PLACE) >> (32 - BITS)).to(tl.float32)


@triton.jit
def _uniform(seed: tl.tensor, counter: tl.tensor, UNITS: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Numbers from [0, 1) (UNITS, UNIT / 4, 4) by counters (UNITS, UNIT / 4), of 24 bits each."""
    zero = (counter * 0).to(tl.uint32)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    first, second, third, fourth = tl.philox(seed, low, high, zero, zero)
    words = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [UNITS, UNIT // 4, 4])
    return (words >> 8).to(tl.float32) * 0.000000059604644775390625


@launched
@triton.jit(
    do_not_specialize=["scale_stride", "period", "stride", "seed", "counter", "blocks", "block", "units", "size"]
)
def _quantize(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, scales: tl.tensor, codes: tl.tensor, signs: tl.tensor,
    table: tl.tensor, scale_stride: tl.int64, code_stride: tl.int64, period: tl.int64, stride: tl.int64, seed: tl.int64,
    counter: tl.int64,
    blocks: tl.int64, block: tl.int64, units: tl.int64, size: tl.int64,
    LEVELS: tl.constexpr, HELD: tl.constexpr, RANDOM: tl.constexpr, BITS: tl.constexpr,
    STEPS: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, PLACED: tl.constexpr, ALIGNED: tl.constexpr,
    EACH: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
) -> None:  # fmt: skip
    if is_whole(table, period, units, size, PLACED, EACH, UNITS, UNIT, EXACT):
        _quantize_units(grad, before, after, scales, codes, signs, table, scale_stride, code_stride, period, stride,
                        seed, counter, blocks, block, units, size, LEVELS, HELD, RANDOM, BITS, STEPS,
                        LIMIT, OFFSET, PLACED, ALIGNED, EACH, UNITS, UNIT, True)  # fmt: skip
    else:
        _quantize_units(grad, before, after, scales, codes, signs, table, scale_stride, code_stride, period, stride,
                        seed, counter, blocks, block, units, size, LEVELS, HELD, RANDOM, BITS, STEPS,
                        LIMIT, OFFSET, PLACED, ALIGNED, EACH, UNITS, UNIT, False)  # fmt: skip


@triton.jit
def _quantize_units(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, scales: tl.tensor, codes: tl.tensor, signs: tl.tensor,
    table: tl.tensor, scale_stride: tl.tensor, code_stride: tl.tensor, period: tl.tensor, stride: tl.tensor,
    seed: tl.tensor, counter: tl.tensor,
    blocks: tl.tensor, block: tl.tensor, units: tl.tensor, size: tl.tensor,
    LEVELS: tl.constexpr, HELD: tl.constexpr, RANDOM: tl.constexpr, BITS: tl.constexpr,
    STEPS: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, PLACED: tl.constexpr, ALIGNED: tl.constexpr,
    EACH: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    unit, row, column, place, left = unit_places(blocks, block, EACH, UNITS, UNIT)
    first, end = vector_places(table, period, stride, unit, place, left, units, size, PLACED, ALIGNED, EACH, UNIT)
    places, limit = first[:, None, None] + _lanes(UNIT), end[:, None, None]
    numbers = load_tile(grad, places, limit, WHOLE)
    if HELD:
        numbers += load_tile(before, places, limit, WHOLE)
    numbers = turned(numbers, signs, limit - first[:, None, None], LEVELS, UNITS, UNIT, 4, False, WHOLE)
    sizes = tl.abs(numbers)
    largest = tl.max(tl.max(sizes, 2), 1)
    finite = tl.min(tl.min((sizes < float("inf")).to(tl.int32), 2), 1) == 1  # NaN is not less
    scale = tl.where(finite, tl.div_rn(largest, tl.full([UNITS], STEPS, tl.float32)), float("nan"))
    divisor = tl.where(largest == 0, 1.0, largest)[:, None, None]
    levels = tl.div_rn(numbers, divisor + tl.zeros([UNITS, UNIT // 4, 4], tl.float32)) * STEPS
    levels = tl.where(finite[:, None, None], levels, 0.0)
    levels -= OFFSET
    if RANDOM:
        counters = counter + place[:, None] // 4 + tl.arange(0, UNIT // 4)[None, :]
        levels = tl.where(places < limit, tl.floor(levels + _uniform(seed, counters, UNITS, UNIT)), 0.0)
    else:
        levels = (levels + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is added leaves no bits behind the point
    levels = tl.minimum(tl.maximum(levels + OFFSET, -LIMIT), LIMIT)
    tl.store(scales + row * scale_stride + column, scale, mask=unit < units)
    byte, packed = _bytes(UNIT, BITS), _packed(levels - OFFSET, BITS, UNITS, UNIT)
    start = (row * code_stride + place_in_row(row, place, blocks, block) * BITS // 8)[:, None, None] + byte
    if WHOLE:
        tl.store(codes + start, packed)
    else:
        tl.store(codes + start, packed, mask=(unit < units)[:, None, None] & (byte * 8 < left[:, None, None] * BITS))
    if HELD:
        numbers -= scale[:, None, None] * levels
        numbers = turned(numbers, signs, limit - first[:, None, None], LEVELS, UNITS, UNIT, 4, True, WHOLE)
        store_tile(after, places, numbers, limit, WHOLE)


@launched
@triton.jit(
    do_not_specialize=[
        "voter_scales",
        "scale_stride",
        "period",
        "stride",
        "voters",
        "share",
        "blocks",
        "block",
        "units",
        "size",
    ]
)
def _dequantize(
    scales: tl.tensor, codes: tl.tensor, out: tl.tensor, residual: tl.tensor, signs: tl.tensor,
    table: tl.tensor, voter_scales: tl.int64, scale_stride: tl.int64, voter_codes: tl.int64, code_stride: tl.int64,
    period: tl.int64, stride: tl.int64, voters: tl.int64, share: tl.float32, blocks: tl.int64, block: tl.int64,
    units: tl.int64, size: tl.int64,
    LEVELS: tl.constexpr, HELD: tl.constexpr, BITS: tl.constexpr,
    OFFSET: tl.constexpr, PLACED: tl.constexpr, ALIGNED: tl.constexpr, EACH: tl.constexpr, UNITS: tl.constexpr,
    UNIT: tl.constexpr, EXACT: tl.constexpr,
) -> None:  # fmt: skip
    if is_whole(table, period, units, size, PLACED, EACH, UNITS, UNIT, EXACT):
        _dequantize_units(scales, codes, out, residual, signs, table, voter_scales, scale_stride, voter_codes, code_stride,
                          period, stride, voters, share, blocks, block, units, size, LEVELS, HELD, BITS,
                          OFFSET, PLACED, ALIGNED, EACH, UNITS, UNIT, True)  # fmt: skip
    else:
        _dequantize_units(scales, codes, out, residual, signs, table, voter_scales, scale_stride, voter_codes, code_stride,
                          period, stride, voters, share, blocks, block, units, size, LEVELS, HELD, BITS,
                          OFFSET, PLACED, ALIGNED, EACH, UNITS, UNIT, False)  # fmt: skip


@triton.jit
def _dequantize_units(
    scales: tl.tensor, codes: tl.tensor, out: tl.tensor, residual: tl.tensor, signs: tl.tensor,
    table: tl.tensor, voter_scales: tl.tensor, scale_stride: tl.tensor, voter_codes: tl.tensor, code_stride: tl.tensor,
    period: tl.tensor, stride: tl.tensor, voters: tl.tensor, share: tl.tensor, blocks: tl.tensor, block: tl.tensor,
    units: tl.tensor, size: tl.tensor,
    LEVELS: tl.constexpr, HELD: tl.constexpr, BITS: tl.constexpr,
    OFFSET: tl.constexpr, PLACED: tl.constexpr, ALIGNED: tl.constexpr, EACH: tl.constexpr, UNITS: tl.constexpr,
    UNIT: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    unit, row, column, place, left = unit_places(blocks, block, EACH, UNITS, UNIT)
    byte = _bytes(UNIT, BITS)
    there = unit < units
    inside = there[:, None, None] & (byte * 8 < left[:, None, None] * BITS)
    codes += (row * code_stride + place_in_row(row, place, blocks, block) * BITS // 8)[:, None, None]
    total = tl.zeros([UNITS, UNIT // 4, 4], tl.float32)
    for voter in tl.range(voters, loop_unroll_factor=4 if WHOLE else 1):
        scale = tl.load(scales + voter * voter_scales + row * scale_stride + column, mask=there, other=0)
        if WHOLE:
            code = tl.load(codes + voter * voter_codes + byte)
        else:
            code = tl.load(codes + voter * voter_codes + byte, mask=inside, other=0)
        total += scale[:, None, None] * (_unpacked(code, BITS, UNITS, UNIT) + OFFSET)
    first, end = vector_places(table, period, stride, unit, place, left, units, size, PLACED, ALIGNED, EACH, UNIT)
    limit = end[:, None, None]
    total = turned(total * share, signs, limit - first[:, None, None], LEVELS, UNITS, UNIT, 4, True, WHOLE)
    store_mean(out, residual, first[:, None, None] + _lanes(UNIT), total, limit, HELD, WHOLE)
