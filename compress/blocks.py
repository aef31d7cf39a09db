"""A bucket as whole blocks: those that all ranks have chosen are averaged, the others wait."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .protocol import Program, all_reduce


def in_blocks(flat: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Views of `flat`: its whole blocks, (blocks, length), and the fewer elements behind the last of them."""
    count = flat.numel() // length
    return flat[: count * length].view(count, length), flat[count * length :]


def chosen_of(blocks: int, ratio: float) -> int:
    """How many of so many blocks are sent: `ratio` of them, rounded up.

    >>> [chosen_of(blocks, 0.01) for blocks in (0, 1, 100, 101)]
    [0, 1, 1, 2]
    """
    return math.ceil(ratio * blocks)


def average_blocks(
    grad: Tensor, values: Tensor, chosen: Tensor, length: int, alarm: Tensor | None = None
) -> Program[Tensor]:
    """The mean over ranks of the `chosen` blocks of `values`, in their places in `grad`; the others become zero there.

    `chosen`: indices, each once, the same on all ranks. The elements behind the last whole block are always sent.
    `values` is either `grad` or what is to be held back, which is then cleared of what was sent. `alarm`: 0, or NaN where
    the average must not be finite.
    """
    blocks, rest = in_blocks(values, length)
    payload = torch.cat([blocks.index_select(0, chosen).view(-1), rest])
    if alarm is not None:
        payload.add_(alarm)
    if values is not grad:
        blocks.index_fill_(0, chosen, 0)
        rest.zero_()
    means, rest_mean = in_blocks((yield from all_reduce(payload)), length)
    blocks, rest = in_blocks(grad.zero_(), length)
    blocks.index_copy_(0, chosen, means.to(grad.dtype))
    rest.copy_(rest_mean)
    return grad
