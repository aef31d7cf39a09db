"""Rotations of blocks, after which no element stands out: codes of few bits lose less."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_rotate_blocks
from .dispatch import operation


@operation(check=check_rotate_blocks, apart=[("values", "signs")])
def rotate_blocks(values: Tensor, signs: Tensor, back: bool = False) -> None:
    """Multiply each block of `values` by its signs and the Hadamard matrix over the root of its size; `back`: undo it.

    Suresh et al. 2017, "Distributed Mean Estimation with Limited Communication", section 3. `values`: flat, float32 or
    float64, in place; `signs`: 1 or -1, as many as a block has elements, a power of two. What lies behind the last whole
    block is rotated in blocks of smaller powers of two, the largest first, by the first of the signs.
    """
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


def _transformed(blocks: Tensor) -> Tensor:
    """Each row times the Hadamard matrix (Sylvester's), by sums and differences of neighbours, then of pairs, and so on."""
    count, block = blocks.shape
    width = 1
    while width < block:
        first, second = blocks.view(count, -1, 2, width).unbind(2)
        blocks = torch.stack((first + second, first - second), 2)
        width *= 2
    return blocks.reshape(count, block).clone() if block == 1 else blocks.view(count, block)
