"""Collectives without intermediaries: in step d each rank sends to the one d ranks on.

So no rank has two that begin with it, and a block arrives after one message, where a ring passes it on from rank to rank.
Sums of one chunk overlap the arrival of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .wire import Chunk, Scratch, Wire, in_chunks, run


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
