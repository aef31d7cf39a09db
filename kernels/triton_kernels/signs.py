"""1-bit payloads: sign bits and block scales in one pass, and the mean of all voters in one pass.

A block of one unit is encoded while it lies in registers; that of several takes a pass for its sum, one for the residual.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operands import Places, Residual
from ..rotation import encoded_rotated
from .launching import launched, on_device, options
from .rotation import rotate_blocks, turned
from .tiles import load_tile, store_mean, store_tile
from .units import cut, is_whole, place_in_row, placed, unit_places, vector_places

SUMS = 1024


def sign_pack(
    grad: Tensor,
    residual: Residual | None,
    scales: Tensor,
    bits: Tensor,
    length: int,
    signs: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """Signs and block scales of `grad` (+ `residual`); `residual` keeps the rest.

    With `signs` the rotations are passes of their own: a kernel that packs bits and rotates takes longer.
    """
    if signs is not None:
        rest = scales, bits, length, None, places
        return encoded_rotated(
            lambda values, held: sign_pack(values, held, *rest), grad, residual, signs, places, rotate_blocks
        )
    rows, blocks = scales.shape
    units = cut(rows * blocks, length // blocks)
    if not units.count:
        return
    place = (blocks, units.block, units.count, grad.numel())
    held, strides = residual or Residual(grad, grad), (scales.stride(0), bits.stride(0))
    sums = scales if units.each == 1 else torch.empty(units.count, dtype=torch.float32, device=grad.device)
    (table, *turns), where = placed(places, scales)
    with on_device(grad):
        _pack[units.programs](
            grad, *held, scales, bits, sums, table, *strides, *turns, *place,
            HELD=residual is not None, **where, **units.sizes,
        )  # fmt: skip
        if units.each > 1:
            _scale[(rows * blocks,)](
                sums, scales, table, strides[0], turns[0], *place, units.each,
                PLACED=where["PLACED"], TILE=SUMS, **options(4),
            )  # fmt: skip
        if units.each > 1 and residual is not None:
            _subtract_signs[units.programs](
                residual.after, scales, table, strides[0], *turns, *place, **where, **units.sizes
            )


def sign_unpack_mean(
    scales: Tensor,
    bits: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    signs: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """The mean over voters of `scale * sign`, rotated back; what `out` rounds away is added to `residual`."""
    voters, rows, blocks = scales.shape
    units = cut(rows * blocks, bits.shape[2] * 8 // blocks)
    if not units.count:
        return
    place = (blocks, units.block, units.count, out.numel())
    held = out if residual is None else residual
    strides = (*scales.stride()[:2], *bits.stride()[:2])
    (table, *turns), where = placed(places, scales)
    with on_device(out):
        _unpack[units.programs](
            scales, bits, out, held, out if signs is None else signs, table, *strides, *turns, voters, 1 / voters, *place,
            HELD=residual is not None, **where, **units.rotated_by(signs),
        )  # fmt: skip


@triton.jit
def _lanes(UNIT: tl.constexpr) -> tl.tensor:
    """The elements of a unit as bytes of 8."""
    return tl.arange(0, UNIT // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]


@launched
@triton.jit(do_not_specialize=["scale_stride", "period", "stride", "blocks", "block", "units", "size"])
def _pack(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, scales: tl.tensor, bits: tl.tensor, sums: tl.tensor,
    table: tl.tensor, scale_stride: tl.int64, bit_stride: tl.int64, period: tl.int64, stride: tl.int64,
    blocks: tl.int64, block: tl.int64, units: tl.int64, size: tl.int64,
    HELD: tl.constexpr, PLACED: tl.constexpr, ALIGNED: tl.constexpr,
    EACH: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
) -> None:  # fmt: skip
    if is_whole(table, period, units, size, PLACED, EACH, UNITS, UNIT, EXACT):
        _pack_units(grad, before, after, scales, bits, sums, table, scale_stride, bit_stride, period, stride,
                    blocks, block, units, size, HELD, PLACED, ALIGNED, EACH, UNITS, UNIT, True)  # fmt: skip
    else:
        _pack_units(grad, before, after, scales, bits, sums, table, scale_stride, bit_stride, period, stride,
                    blocks, block, units, size, HELD, PLACED, ALIGNED, EACH, UNITS, UNIT, False)  # fmt: skip


@triton.jit
def _pack_units(
    grad: tl.tensor, before: tl.tensor, after: tl.tensor, scales: tl.tensor, bits: tl.tensor, sums: tl.tensor,
    table: tl.tensor, scale_stride: tl.tensor, bit_stride: tl.tensor, period: tl.tensor, stride: tl.tensor,
    blocks: tl.tensor, block: tl.tensor, units: tl.tensor, size: tl.tensor,
    HELD: tl.constexpr, PLACED: tl.constexpr, ALIGNED: tl.constexpr,
    EACH: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    unit, row, column, place, left = unit_places(blocks, block, EACH, UNITS, UNIT)
    first, end = vector_places(table, period, stride, unit, place, left, units, size, PLACED, ALIGNED, EACH, UNIT)
    lane = _lanes(UNIT)
    places, limit = first[:, None, None] + lane, end[:, None, None]
    values = load_tile(grad, places, limit, WHOLE)
    if HELD:
        values += load_tile(before, places, limit, WHOLE)
    positive = values >= 0
    packed = tl.sum(positive.to(tl.int32) << (lane & 7), 2)
    byte = tl.arange(0, UNIT // 8)[None, :]
    start = (row * bit_stride + place_in_row(row, place, blocks, block) // 8)[:, None] + byte
    inside = (unit < units)[:, None] & (byte * 8 < left[:, None])
    tl.store(bits + start, packed.to(tl.uint8), mask=inside)
    total = tl.sum(tl.sum(tl.abs(values), 2), 1)
    if EACH == 1:
        elements = tl.maximum(end - first, 1)
        scale = tl.div_rn(total, elements.to(tl.float32))
        tl.store(scales + row * scale_stride + column, scale, mask=unit < units)
        values -= tl.where(positive, scale[:, None, None], -scale[:, None, None])
    else:
        tl.store(sums + unit, total, mask=unit < units)
    if HELD:
        store_tile(after, places, values, limit, WHOLE)


@launched
@triton.jit(do_not_specialize=["scale_stride", "blocks", "block", "units", "size", "each", "period"])
def _scale(
    sums: tl.tensor, scales: tl.tensor, table: tl.tensor, scale_stride: tl.int64, period: tl.int64,
    blocks: tl.int64, block: tl.int64, units: tl.int64, size: tl.int64, each: tl.int64,
    PLACED: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, each, TILE):
        lane = start + tl.arange(0, TILE)
        total += tl.load(sums + group * each + lane, mask=lane < each, other=0)
    if PLACED:
        elements = tl.maximum(tl.load(table + 2 * (group % period) + 1), 1)
    else:
        elements = tl.minimum(tl.maximum(size - group * block, 1), block)
    row = group // blocks
    tl.store(scales + row * scale_stride + (group - row * blocks), tl.div_rn(tl.sum(total, 0), elements.to(tl.float32)))


@launched
@triton.jit(do_not_specialize=["scale_stride", "period", "stride", "blocks", "block", "units", "size"])
def _subtract_signs(
    residual: tl.tensor, scales: tl.tensor, table: tl.tensor, scale_stride: tl.int64, period: tl.int64, stride: tl.int64,
    blocks: tl.int64, block: tl.int64, units: tl.int64, size: tl.int64,
    PLACED: tl.constexpr, ALIGNED: tl.constexpr, EACH: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:  # fmt: skip
    if is_whole(table, period, units, size, PLACED, EACH, UNITS, UNIT, EXACT):
        _subtract_units(residual, scales, table, scale_stride, period, stride, blocks, block, units, size,
                        PLACED, ALIGNED, EACH, UNITS, UNIT, True)  # fmt: skip
    else:
        _subtract_units(residual, scales, table, scale_stride, period, stride, blocks, block, units, size,
                        PLACED, ALIGNED, EACH, UNITS, UNIT, False)  # fmt: skip


@triton.jit
def _subtract_units(
    residual: tl.tensor, scales: tl.tensor, table: tl.tensor, scale_stride: tl.tensor, period: tl.tensor,
    stride: tl.tensor, blocks: tl.tensor, block: tl.tensor, units: tl.tensor, size: tl.tensor,
    PLACED: tl.constexpr, ALIGNED: tl.constexpr, EACH: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    unit, row, column, place, left = unit_places(blocks, block, EACH, UNITS, UNIT)
    first, end = vector_places(table, period, stride, unit, place, left, units, size, PLACED, ALIGNED, EACH, UNIT)
    places, limit = first[:, None, None] + _lanes(UNIT), end[:, None, None]
    values = load_tile(residual, places, limit, WHOLE)
    scale = tl.load(scales + row * scale_stride + column, mask=unit < units, other=0)[:, None, None]
    store_tile(residual, places, values - tl.where(values >= 0, scale, -scale), limit, WHOLE)


@launched
@triton.jit(
    do_not_specialize=[
        "scale_stride",
        "period",
        "stride",
        "voter_scales",
        "voters",
        "share",
        "blocks",
        "block",
        "units",
        "size",
    ]
)
def _unpack(
    scales: tl.tensor, bits: tl.tensor, out: tl.tensor, residual: tl.tensor, signs: tl.tensor,
    table: tl.tensor, voter_scales: tl.int64, scale_stride: tl.int64, voter_bits: tl.int64, bit_stride: tl.int64,
    period: tl.int64, stride: tl.int64,
    voters: tl.int64, share: tl.float32,
    blocks: tl.int64, block: tl.int64, units: tl.int64, size: tl.int64,
    HELD: tl.constexpr, LEVELS: tl.constexpr, PLACED: tl.constexpr, ALIGNED: tl.constexpr,
    EACH: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
) -> None:  # fmt: skip
    if is_whole(table, period, units, size, PLACED, EACH, UNITS, UNIT, EXACT):
        _unpack_units(scales, bits, out, residual, signs, table, voter_scales, scale_stride, voter_bits, bit_stride,
                      period, stride, voters, share, blocks, block, units, size, HELD, LEVELS,
                      PLACED, ALIGNED, EACH, UNITS, UNIT, True)  # fmt: skip
    else:
        _unpack_units(scales, bits, out, residual, signs, table, voter_scales, scale_stride, voter_bits, bit_stride,
                      period, stride, voters, share, blocks, block, units, size, HELD, LEVELS,
                      PLACED, ALIGNED, EACH, UNITS, UNIT, False)  # fmt: skip


@triton.jit
def _unpack_units(
    scales: tl.tensor, bits: tl.tensor, out: tl.tensor, residual: tl.tensor, signs: tl.tensor,
    table: tl.tensor, voter_scales: tl.tensor, scale_stride: tl.tensor, voter_bits: tl.tensor, bit_stride: tl.tensor,
    period: tl.tensor, stride: tl.tensor,
    voters: tl.tensor, share: tl.tensor,
    blocks: tl.tensor, block: tl.tensor, units: tl.tensor, size: tl.tensor,
    HELD: tl.constexpr, LEVELS: tl.constexpr, PLACED: tl.constexpr, ALIGNED: tl.constexpr,
    EACH: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """Elements by fours, each from half a byte: a thread has those that it writes at once, and passes nothing on."""
    unit, row, column, place, left = unit_places(blocks, block, EACH, UNITS, UNIT)
    byte, half = tl.arange(0, UNIT // 8)[None, :, None], tl.arange(0, 2)[None, None, :]
    there = unit < units
    inside = there[:, None, None] & (byte * 8 < left[:, None, None])
    bits += (row * bit_stride + place_in_row(row, place, blocks, block) // 8)[:, None, None]
    first_sum = tl.zeros([UNITS, UNIT // 8, 2], tl.float32)
    second_sum, third_sum, fourth_sum = first_sum, first_sum, first_sum
    for voter in tl.range(voters, loop_unroll_factor=4 if WHOLE else 1):
        scale = tl.load(scales + voter * voter_scales + row * scale_stride + column, mask=there, other=0)[:, None, None]
        places = bits + voter * voter_bits + byte
        packed = tl.load(places) if WHOLE else tl.load(places, mask=inside, other=0)
        four = packed.to(tl.uint32) >> (half * 4).to(tl.uint32)
        first_sum += _signed(scale, four, 0)
        second_sum += _signed(scale, four, 1)
        third_sum += _signed(scale, four, 2)
        fourth_sum += _signed(scale, four, 3)
    total = tl.join(tl.join(first_sum, third_sum), tl.join(second_sum, fourth_sum))
    total = tl.reshape(total, [UNITS, UNIT // 4, 4]) * share
    lane = tl.arange(0, UNIT // 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    first, end = vector_places(table, period, stride, unit, place, left, units, size, PLACED, ALIGNED, EACH, UNIT)
    limit = end[:, None, None]
    total = turned(total, signs, limit - first[:, None, None], LEVELS, UNITS, UNIT, 4, True, WHOLE)
    store_mean(out, residual, first[:, None, None] + lane, total, limit, HELD, WHOLE)


@triton.jit
def _signed(scale: tl.tensor, bits: tl.tensor, BIT: tl.constexpr) -> tl.tensor:
    """`scale` where the bit is set, else -`scale`: the bit turns the sign, by a shift and a logic operation."""
    turned = (bits << (31 - BIT)) & 0x80000000
    return ((-scale).to(tl.uint32, bitcast=True) ^ turned).to(tl.float32, bitcast=True)
