"""Loads and stores of a tile of a flat vector, which kernels share; units.py and each kernel have the sizes."""

from __future__ import annotations

import triton
import triton.language as tl

from . import INTERPRETED

FIELDS = tl.constexpr(11)  # of a task of a matrix: see `tasks`
ROUND_BY_HAND = tl.constexpr(INTERPRETED)  # Triton's interpreter cuts off what bfloat16 does not hold


@triton.jit
def told(number: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """The same number, in a way that tells the compiler that it is a multiple of 4."""
    if ALIGNED:
        return number // 4 * 4
    else:
        return number


@triton.jit
def load_tile(vector: tl.tensor, places: tl.tensor, limit: tl.tensor, WHOLE: tl.constexpr) -> tl.tensor:
    """Elements as float32, zero from `limit` on; all of a WHOLE tile are before it, which spares the mask."""
    if WHOLE:
        return tl.load(vector + places, eviction_policy="evict_first").to(tl.float32)
    else:
        return tl.load(vector + places, mask=places < limit, other=0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def store_tile(vector: tl.tensor, places: tl.tensor, values: tl.tensor, limit: tl.tensor, WHOLE: tl.constexpr) -> None:
    """float32 numbers into a vector, those from `limit` on nowhere."""
    if WHOLE:
        tl.store(vector + places, rounded(values, vector.dtype.element_ty))
    else:
        tl.store(vector + places, rounded(values, vector.dtype.element_ty), mask=places < limit)


@triton.jit
def rounded(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float32 numbers in a float type, rounded to nearest, ties to even."""
    if ROUND_BY_HAND and tl.bfloat16 == dtype:
        bits = values.to(tl.uint32, bitcast=True)
        bits = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)


@triton.jit
def store_mean(
    out: tl.tensor, residual: tl.tensor, places: tl.tensor, mean: tl.tensor, limit: tl.tensor,
    HELD: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """A mean into a vector; what its type rounds away is added to `residual` where that is HELD."""
    store_tile(out, places, mean, limit, WHOLE)
    if HELD:
        lost = mean - rounded(mean, out.dtype.element_ty).to(tl.float32)
        store_tile(residual, places, load_tile(residual, places, limit, WHOLE) + lost, limit, WHOLE)
