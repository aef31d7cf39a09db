"""Tables of blocks that begin anew at each parameter of a flat vector.

A block has one scale. If it held elements of two parameters, the one with the smaller numbers would be rounded to zeros.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...kernels import Places

Span: TypeAlias = tuple[int, int]  # first element, elements
Table: TypeAlias = npt.NDArray[np.int64]  # (blocks, 2): a span each
ORDER = 4  # elements: what a GPU loads at once


def spans_of(sizes: Sequence[int]) -> list[Span]:
    """Return the span of each parameter, one behind the other."""
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def sizes_within(sizes: Sequence[int], start: int, end: int) -> tuple[int, ...]:
    """Return how many elements of each parameter lie in a part of the vector."""
    return tuple(max(0, min(first + size, end) - max(first, start)) for first, size in spans_of(sizes))


def count_blocks(sizes: Sequence[int], block: int) -> int:
    """Return the number of blocks of parameters of these sizes."""
    return sum(-(-size // block) for size in sizes)


def in_order(sizes: Sequence[int], block: int) -> bool:
    """Return True if no block crosses the border of a parameter where blocks lie one behind the other."""
    return all(first % block == 0 for first, size in spans_of(sizes) if size)


def blocks_of(spans: Sequence[Span], block: int, room: Sequence[int] | None = None) -> Table:
    """Return the first element and the elements of each block, int64 (blocks, 2). `room`: elements to have blocks for."""
    firsts, sizes = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    counts = -(-(sizes if room is None else np.array(room, dtype=np.int64)) // block)
    owner = np.repeat(np.arange(len(counts)), counts)
    within = (np.arange(len(owner)) - (counts.cumsum() - counts)[owner]) * block
    return np.stack([firsts[owner] + within, (sizes[owner] - within).clip(0, block)], 1)


def places_of(blocks: int, table: Callable[[], Table], device: torch.device, rows: int = 1, stride: int = 0) -> Places:
    """Return the places of so many blocks, in so many rows. On the meta device, where nobody reads it, no table is made."""
    if device.type == "meta":
        return Places(torch.empty(blocks, 2, dtype=torch.int64, device=device), rows * blocks, stride)
    made = table()
    aligned = not (made[:, 0] % ORDER).any() and not stride % ORDER
    return Places(torch.tensor(made, dtype=torch.int64, device=device), rows * blocks, stride, aligned)
