"""Rotations of blocks: all sums and differences of a block while it lies in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launching import divided, on_device, options, tile

TILE = tile(1024, interpreted=4096)  # elements of a program, at least
ELEMENTS_PER_WARP = 1024


def rotate_blocks(values: Tensor, signs: Tensor, back: bool = False) -> None:
    """Whole blocks, then what is left in smaller powers of two."""
    start, block = 0, signs.numel()
    with on_device(values):
        while start < values.numel():
            count = (values.numel() - start) // block
            each = max(1, TILE // block)
            if count:
                _rotate[(divided(count, each),)](
                    values[start:], signs, block**-0.5, count,
                    BLOCK=block, LEVELS=block.bit_length() - 1, EACH=each, BACK=back,
                    **options(max(1, each * block // ELEMENTS_PER_WARP)),
                )  # fmt: skip
            start += count * block
            block //= 2


@triton.jit(do_not_specialize=["count"])
def _rotate(
    values: tl.tensor, signs: tl.tensor, factor: tl.float32, count: tl.int64,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, EACH: tl.constexpr, BACK: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    lane = tl.arange(0, BLOCK)
    places, there = block[:, None] * BLOCK + lane[None, :], (block < count)[:, None]
    numbers = tl.load(values + places, mask=there, other=0)
    sign = tl.load(signs + lane)[None, :]
    if not BACK:
        numbers *= sign
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(numbers, [EACH, BLOCK // (2 << level), 2, 1 << level])
        first, second = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
        pairs = tl.permute(tl.join(first + second, first - second), [0, 1, 3, 2])
        numbers = tl.reshape(pairs, [EACH, BLOCK])
    numbers *= factor
    if BACK:
        numbers *= sign
    tl.store(values + places, numbers, mask=there)
