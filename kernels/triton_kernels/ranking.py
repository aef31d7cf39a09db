"""The rank of elements by magnitude, and their rounding for a payload."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import rounded


@triton.jit
def magnitude(numbers: tl.tensor) -> tl.tensor:
    """int32 that ranks float32 by magnitude: the bits without the sign, NaN with the infinities, which are largest."""
    return tl.minimum(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)


@triton.jit
def chosen_of(keys: tl.tensor, threshold: tl.tensor, ties: tl.tensor) -> tl.tensor:
    """Return True for keys (rows, columns) above the threshold or among the first `ties` that equal it."""
    equal = keys == threshold
    return (keys > threshold) | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= ties))


@triton.jit
def narrowed(numbers: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float32 in a float type, those beyond its range at its largest finite number; infinities and NaN stay."""
    if dtype == tl.float32:
        return numbers
    else:
        limit = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
        clamped = tl.minimum(tl.maximum(numbers, -limit), limit)
        return rounded(tl.where(tl.abs(numbers) < float("inf"), clamped, numbers), dtype)
