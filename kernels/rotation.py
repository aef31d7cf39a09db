"""Rotations of blocks, after which no element stands out: codes of few bits lose less."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .argument_checks import check_rotate_blocks
from .casting import cast_scaled
from .dispatch import operation
from .memory_pool import temporary
from .operands import Places, Residual


@operation(check=check_rotate_blocks, apart=[("values", "signs")])
def rotate_blocks(values: Tensor, signs: Tensor, back: bool = False, places: Places | None = None) -> None:
    """Multiply each block of `values` by its signs and the Hadamard matrix over the root of its size; `back`: undo it.

    Suresh et al. 2017, "Distributed Mean Estimation with Limited Communication", section 3. `values`: flat, float32 or
    float64, in place; `signs`: 1 or -1, as many as a block has elements, a power of two. What lies behind the last whole
    block is rotated in blocks of smaller powers of two, the largest first, by the first of the signs. `places`: of the
    blocks in `values`, of which those that have fewer elements are rotated like what lies behind the last whole block.
    """
    if places is not None:
        return _rotate_placed(values, signs, back, *places.spans())
    start, block = 0, signs.numel()
    while start < values.numel():
        count = (values.numel() - start) // block
        blocks = values[start : start + count * block].view(count, block)
        if count and not back:
            blocks.mul_(signs[:block])
        if count:
            blocks.copy_(_transformed(blocks).mul_(block**-0.5))
        if count and back:
            blocks.mul_(signs[:block])
        start += count * block
        block //= 2


def _rotate_placed(values: Tensor, signs: Tensor, back: bool, firsts: Tensor, counts: Tensor) -> None:
    """Rotate blocks in their places: of each size, a power of two, the part of each block that has it."""
    size = signs.numel()
    while size:
        chosen = (counts & size) != 0
        starts = firsts[chosen] + (counts[chosen] & -2 * size)
        elements = starts.unsqueeze(1) + torch.arange(size, device=values.device)
        parts = values[elements.view(-1)]
        if parts.numel():
            rotate_blocks.reference(parts, signs[:size], back)
            values[elements.view(-1)] = parts
        size //= 2


def _transformed(blocks: Tensor) -> Tensor:
    """Each row times the Hadamard matrix (Sylvester's), by sums and differences of neighbours, then of pairs, and so on."""
    count, block = blocks.shape
    width = 1
    while width < block:
        first, second = blocks.view(count, -1, 2, width).unbind(2)
        blocks = torch.stack((first + second, first - second), 2)
        width *= 2
    return blocks.reshape(count, block).clone() if block == 1 else blocks.view(count, block)


def encoded_rotated(
    encode: Callable[[Tensor, Residual | None], None],
    grad: Tensor,
    residual: Residual | None,
    signs: Tensor,
    places: Places | None = None,
    rotate: Callable[..., None] = rotate_blocks.reference,
) -> None:
    """Have `encode` take `grad` (+ `residual`) in rotated blocks; what it leaves is rotated back. `grad` is overwritten."""
    if residual is None:
        wide = grad.to(signs.dtype)
        rotate(wide, signs, False, places)
        return encode(wide, None)
    values = residual.plus(grad)
    rotate(values, signs, False, places)
    encode(grad.zero_(), Residual(values, values))
    rotate(values, signs, True, places)


def decoded_rotated(
    decode: Callable[[Tensor], None],
    out: Tensor,
    residual: Tensor | None,
    signs: Tensor,
    places: Places | None = None,
    rotate: Callable[..., None] = rotate_blocks.reference,
    cast: Callable[..., None] = cast_scaled.reference,
) -> None:
    """Have `decode` write rotated blocks, and rotate them back to `out`; what that rounds away is added to `residual`."""
    wide = out if out.dtype == signs.dtype else temporary(out.shape, dtype=signs.dtype, device=out.device)
    decode(wide)
    rotate(wide, signs, True, places)
    if wide is not out:
        cast(wide, out, 1.0, residual)
