"""A bucket as whole blocks: those that all ranks have chosen are averaged, the others wait."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..protocol.layout import working_dtype
from ..protocol.requests import Program, all_reduce


def in_blocks(flat: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Views of `flat`: its whole blocks, (blocks, length), and the fewer elements behind the last of them."""
    count = flat.numel() // length
    return flat[: count * length].view(count, length), flat[count * length :]


def chosen_of(blocks: int, ratio: float) -> int:
    """Return how many of so many blocks are sent: `ratio` of them, rounded up.

    >>> [chosen_of(blocks, 0.01) for blocks in (0, 1, 100, 101)]
    [0, 1, 1, 2]
    """
    return math.ceil(ratio * blocks)


def average_blocks(
    grad: Tensor, values: Tensor, chosen: Tensor, length: int, alarm: Tensor | None = None
) -> Program[Tensor]:
    """The mean over ranks of the `chosen` blocks of `values`, in their places in `grad`; the others become zero there.

    `chosen`: indices, each once, the same on all ranks. The elements behind the last whole block are always sent.
    `values` is either `grad` or what is to be held back; of what was sent, it keeps what 16 bits cannot hold. `alarm`: 0,
    or NaN where the average must not be finite.
    """
    blocks, rest = in_blocks(values, length)
    payload = torch.cat([blocks.index_select(0, chosen).view(-1), rest]).to(working_dtype(values.dtype))
    if alarm is not None:
        payload.add_(alarm)
    mean = yield from all_reduce(payload)
    rounded = mean.to(grad.dtype)
    if values is not grad:
        _put(torch.zeros_like(mean) if rounded is mean else mean - rounded, values, chosen, length)
    _put(rounded, grad.zero_(), chosen, length)
    return grad


def _put(payload: Tensor, flat: Tensor, chosen: Tensor, length: int) -> None:
    """The `chosen` blocks of `payload`, and what lies behind the last whole one, in their places in `flat`."""
    sent, sent_rest = in_blocks(payload, length)
    blocks, rest = in_blocks(flat, length)
    blocks.index_copy_(0, chosen, sent)
    rest.copy_(sent_rest)
