"""Large blocks in chunks, a few of which are under way at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

UNDER_WAY = 3  # chunks; fewer leave gaps on a link
SMALLEST_BYTES, CHUNK_BYTES = 128 * 1024, 256 * 1024
CHUNKS = 16  # of a large block: connections that share links keep up with each other from chunk to chunk, not within
Chunk: TypeAlias = Iterator[None]  # what begins a chunk's messages up to its only yield, and ends them behind it


def run(chunks: Iterable[Chunk], under_way: int = UNDER_WAY) -> None:
    """Begin and end chunks in order, with so many begun and not ended."""
    begun: deque[Chunk] = deque()
    for chunk in chunks:
        next(chunk)
        begun.append(chunk)
        if len(begun) == under_way:
            next(begun.popleft(), None)
    while begun:
        next(begun.popleft(), None)


def split(flat: Tensor, chunk_bytes: int) -> Sequence[Tensor]:
    """A flat tensor's chunks, the last of which may be shorter."""
    chunks: Sequence[Tensor] = flat.split(chunk_bytes // flat.element_size())
    return chunks


def in_chunks(flat: Tensor) -> Sequence[Tensor]:
    """Split a tensor as `split` does, into chunks small beside the whole and large enough to be worth a message."""
    return split(flat, min(CHUNK_BYTES, max(SMALLEST_BYTES, flat.nbytes // CHUNKS)))


class Scratch:
    """Memory for what arrives: `rows` chunks at each of some places, which take turns."""

    def __init__(self, rows: int, chunk_bytes: int = CHUNK_BYTES, places: int = UNDER_WAY) -> None:
        self._rows, self._places = rows, places
        self._bytes = rows * chunk_bytes
        self._made: list[Tensor] = []
        self._turn = 0

    def next(self, like: Tensor) -> Sequence[Tensor]:
        """Rows of the type and size of a chunk, at the next place; what was there is no longer needed."""
        place, self._turn = self._turn, (self._turn + 1) % self._places
        if place == len(self._made):
            self._made.append(torch.empty(self._bytes, dtype=torch.uint8))
        room = self._made[place].view(like.dtype)[: self._rows * like.numel()]
        return room.view(self._rows, -1).unbind()
