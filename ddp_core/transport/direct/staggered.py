"""All-gather and reduce-scatter without intermediaries: in step d each rank sends to the one d ranks on.

So no rank has two that begin with it, and a block arrives after one message, where a ring passes it on from rank to rank.
Blocks go in chunks, a few of which are under way at a time: sums of one chunk overlap the arrival of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .wire import Wire

CHUNK_BYTES = 256 * 1024
UNDER_WAY = 4  # chunks; fewer leave gaps on the link, more fill the queues of switches
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


class Staggered:
    """Direct collectives over a wire; all ranks make the same calls in the same order."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        rank, size = wire.rank, wire.size
        self._targets = [(rank + step) % size for step in range(1, size)]
        self._sources = [(rank - step) % size for step in range(1, size)]
        self._scratch: list[Tensor] = []  # of the chunks under way, bytes

    def all_gather(self, outputs: Sequence[Tensor], block: Tensor) -> None:
        """Write every rank's `block` to its output. All are flat, contiguous and of one size and type."""
        chunks = zip(*(_split(output) for output in outputs), strict=True)
        run(self._gather(parts, part) for parts, part in zip(chunks, _split(block), strict=True))

    def _gather(self, outputs: Sequence[Tensor], block: Tensor) -> Chunk:
        works = [self._wire.receive(outputs[source], source) for source in self._sources]
        works += [self._wire.send(block, target) for target in self._targets]
        outputs[self._wire.rank].copy_(block)
        yield
        self._wire.wait_all(works)

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor]) -> None:
        """Write to `output` the sum of all ranks' rows for this one, of which `rows` has one for each rank; all as above.

        Rows are added in the order of Gloo's ring: from the rank before this one backwards, its own last.
        """
        chunks = zip(*(_split(row) for row in rows), strict=True)
        places = (place % UNDER_WAY for place in range(-(-output.nbytes // CHUNK_BYTES)))
        parts = zip(_split(output), chunks, places, strict=True)
        run(self._reduce(out, chunk, self._room(out, place)) for out, chunk, place in parts)

    def _reduce(self, output: Tensor, rows: Sequence[Tensor], arrived: Sequence[Tensor]) -> Chunk:
        arrivals = [self._wire.receive(room, source) for room, source in zip(arrived, self._sources, strict=True)]
        sends = [self._wire.send(rows[target], target) for target in self._targets]
        yield
        total = arrived[0]
        for place, arrival in enumerate(arrivals):
            self._wire.wait(arrival)
            if place:
                torch.add(arrived[place], total, out=total)
        torch.add(rows[self._wire.rank], total, out=output)
        self._wire.wait_all(sends)

    def _room(self, like: Tensor, place: int) -> Sequence[Tensor]:
        """Memory for a chunk of every other rank; what the chunk before at this place has used."""
        while len(self._scratch) <= place:
            self._scratch.append(torch.empty((self._wire.size - 1) * CHUNK_BYTES, dtype=torch.uint8))
        room = self._scratch[place].view(like.dtype)[: (self._wire.size - 1) * like.numel()]
        return room.view(-1, like.numel()).unbind()


def _split(flat: Tensor) -> Sequence[Tensor]:
    return flat.split(CHUNK_BYTES // flat.element_size())
