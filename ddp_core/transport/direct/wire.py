"""Messages between two ranks of a group, over a Gloo that nobody else uses, and collectives made of them.

In step d of a collective each rank sends to the one d ranks on. So no rank has two that begin with it, and a block arrives
after one message, where a ring passes it on from rank to rank. Sums of one chunk overlap the arrival of the next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

SHORTEST = 0.001  # seconds of a wait; Gloo takes 0 for no limit
TAG = 0  # one for all: messages differ by their order
UNDER_WAY = 3  # chunks; fewer leave gaps on a link
SMALLEST_BYTES, CHUNK_BYTES = 128 * 1024, 256 * 1024
CHUNKS = 16  # of a large block: connections that share links keep up with each other from chunk to chunk, not within
Chunk: TypeAlias = Iterator[None]  # what begins a chunk's messages up to its only yield, and ends them behind it


class Wire:
    """Sends and receives of one rank. One thread at a time; messages between two ranks keep their order.

    `gloo`: the same ranks' collectives, for that thread too. Making one is a collective call.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)  # torch's types do not list what it can do
        self._deadline = 0.0

    def limit(self, timeout: timedelta) -> None:
        """Have all waits from now on end within `timeout`."""
        self._deadline = time.monotonic() + timeout.total_seconds()

    def seconds_left(self) -> float:
        """Until waits end."""
        return max(0.0, self._deadline - time.monotonic())

    def send(self, tensor: Tensor, rank: int) -> dist.Work:
        """Begin to send a contiguous tensor, which is to stay as it is until this was waited for."""
        work: dist.Work = self.gloo.send([tensor], rank, TAG)
        return work

    def receive(self, tensor: Tensor, rank: int) -> dist.Work:
        """Begin to receive into a contiguous tensor of the size that was sent."""
        work: dist.Work = self.gloo.recv([tensor], rank, TAG)
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for a work, once; RuntimeError where the rank is gone, or at the time limit."""
        work.wait(timedelta(seconds=max(SHORTEST, self.seconds_left())))

    def wait_all(self, works: Iterable[dist.Work]) -> None:
        """Wait for each."""
        for work in works:
            self.wait(work)

    def close(self) -> None:
        """End the connections once no work is left, which other ranks learn of; it may be called again."""
        self.gloo = None


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


class Staggered:
    """Direct collectives over a wire; all ranks make the same calls in the same order, and each returns when all is there.

    Tensors are flat, contiguous and of one size and type. An output for this rank may be its block or row.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        rank, size = wire.rank, wire.size
        self._targets = [(rank + step) % size for step in range(1, size)]
        self._sources = [(rank - step) % size for step in range(1, size)]
        self._scratch = Scratch(size - 1)

    def all_gather(self, outputs: Sequence[Tensor], block: Tensor) -> None:
        """Write every rank's `block` to its output."""
        self.all_to_all(outputs, [block] * self._wire.size)

    def all_to_all(self, outputs: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Write every rank's row for this one to its output.

        Receives are begun first: where two ranks both begin to send, as in Gloo's, what each says of its readiness waits
        behind what it sends, and a link carries one direction after the other.
        """
        chunks = zip(zip(*map(in_chunks, outputs), strict=True), zip(*map(in_chunks, rows), strict=True), strict=True)
        run(self._swap(*parts) for parts in chunks)

    def _swap(self, outputs: Sequence[Tensor], rows: Sequence[Tensor]) -> Chunk:
        works = [self._wire.receive(outputs[source], source) for source in self._sources]
        works += [self._wire.send(rows[target], target) for target in self._targets]
        outputs[self._wire.rank].copy_(rows[self._wire.rank])
        yield
        self._wire.wait_all(works)

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor]) -> None:
        """Write to `output` the sum over ranks of the rows for this one.

        Rows are added in the order of Gloo's ring: from the rank before this one backwards, its own last.
        """
        chunks = zip(*map(in_chunks, rows), strict=True)
        run(self._reduce(out, parts) for out, parts in zip(in_chunks(output), chunks, strict=True))

    def _reduce(self, output: Tensor, rows: Sequence[Tensor]) -> Chunk:
        arrived = self._scratch.next(output)
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

    def close(self) -> None:
        """Have the ranks that wait for this one raise."""
        self._wire.close()
