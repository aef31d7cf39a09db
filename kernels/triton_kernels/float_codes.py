"""Floats of 8 bits by whole numbers alone, so that every GPU has them: see `gradwire.kernels.quantization`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spacing(levels: tl.tensor, EXPONENT: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """Return the distance of neighbouring codes at each level, a power of two, as the bits of a float32."""
    power = levels.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(power, (LEAST + 127) << 23) - ((7 - EXPONENT) << 23)


@triton.jit
def codes_of(levels: tl.tensor, unit_bits: tl.tensor, EXPONENT: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """The int8 codes of levels that are whole multiples of those units."""
    count = (tl.abs(levels) * (0x7F000000 - unit_bits).to(tl.float32, bitcast=True)).to(tl.int32)
    power = (unit_bits >> 23) - (LEAST - (7 - EXPONENT) + 127)
    size = tl.where(count == 0, 0, count + (power << (7 - EXPONENT)))
    return (size | tl.where(levels < 0, 0x80, 0)).to(tl.int8)


@triton.jit
def values_of(codes: tl.tensor, EXPONENT: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """Return the float32 numbers that int8 codes stand for."""
    size = codes.to(tl.int32) & 0x7F
    power = tl.maximum(size >> (7 - EXPONENT), 1) - 1
    count = (size - (power << (7 - EXPONENT))).to(tl.float32)
    value = count * ((power + (LEAST - (7 - EXPONENT) + 127)) << 23).to(tl.float32, bitcast=True)
    return tl.where(codes < 0, -value, value)
