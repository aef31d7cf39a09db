"""All-gather and reduce-scatter over hosts with several ranks, which share memory: a block enters a host once.

The ranks of one place on every host are a rail. A block goes along its rail alone, straight into memory that all ranks of
the receiving host have mapped, and these copy it out. A reduce-scatter is the mirror image: the ranks of a host put their
rows into shared memory, each adds up those that its rail is to have, and sends the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from mmap import PAGESIZE
from typing import TypeAlias

import numpy
import torch
from torch import Tensor

from .hosts import HostBarrier, header_bytes, shared_memory
from .wire import Chunk, Scratch, Staggered, Wire, run, split

MOST_BYTES = 2**26  # of a host's shared memory
ALONE = 2, 4, 2**20  # of a host without others: chunks under way, parts of the memory, bytes of a row's chunk
AMONG_OTHERS = 2, 3, 2**18
SMALLEST_CHUNK = 2**12
Slots: TypeAlias = Sequence[Sequence[Tensor]]


class Rails:
    """Both over the ranks of `hosts`, as many on each, called as `Staggered` is. `memory`: what each host's share.

    Chunks take turns in the parts of the memory. A part is free again once the host's ranks have arrived, with a later
    chunk, where they only arrive when they have read this one: with other hosts, at the next one's blocks; without, at the
    beginning of the chunk that is as many further on as are under way. `barrier` has a counter for each step of each part.
    """

    def __init__(self, wire: Wire, hosts: Sequence[Sequence[int]], memory: Tensor, barrier: HostBarrier) -> None:
        self._wire, self._barrier = wire, barrier
        (mine,) = (host for host, ranks in enumerate(hosts) if wire.rank in ranks)
        self._place = place = hosts[mine].index(wire.rank)
        self._host = hosts[mine]
        self._later = [hosts[(mine + step) % len(hosts)] for step in range(1, len(hosts))]
        self._earlier = self._later[::-1]  # in the order in which their blocks arrive
        self._targets, self._sources = ([ranks[place] for ranks in each] for each in (self._later, self._earlier))
        self._under_way, turns, chunk = _layout(hosts)
        self._steps = len(hosts)
        self._summed, self._gathered = chunk, chunk * len(self._host)
        self._memory = memory.view(turns, -1)
        self._parts: Iterator[int] = (number % turns for number in count())
        self._touched = 0  # bytes of each part that have been in use
        self._scratch, self._sums = (Scratch(max(1, len(self._targets)), chunk, self._under_way) for _ in range(2))
        self._swap = Staggered(wire).all_to_all

    def all_gather(self, outputs: Sequence[Tensor], block: Tensor) -> None:
        parts = zip(*(split(output, self._gathered) for output in outputs), strict=True)
        blocks = split(block, self._gathered)
        run((self._gather(out, part) for out, part in zip(parts, blocks, strict=True)), self._under_way)

    def _gather(self, outputs: Sequence[Tensor], block: Tensor) -> Chunk:
        (slots,), counters = self._room(block, 1)
        mine = self._wire.rank
        arrivals = [self._wire.receive(slots[source], source) for source in self._sources]
        slots[mine].copy_(block)
        works = [self._wire.send(slots[mine], target) for target in self._targets]
        self._barrier.arrive(counters[0])
        if outputs[mine].data_ptr() != block.data_ptr():
            outputs[mine].copy_(block)
        yield
        for step, host in enumerate([self._host, *self._earlier]):
            if step:
                self._wire.wait(arrivals[step - 1])
                self._barrier.arrive(counters[step])
            self._barrier.wait(counters[step])
            for rank in host:
                if rank != mine:
                    outputs[rank].copy_(slots[rank])
        self._wire.wait_all(works)

    def all_to_all(self, outputs: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        self._swap(outputs, rows)  # no two ranks of a host want the same

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor]) -> None:
        parts = zip(*(split(row, self._summed) for row in rows), strict=True)
        outputs = split(output, self._summed)
        run((self._reduce(out, part) for out, part in zip(outputs, parts, strict=True)), self._under_way)

    def _reduce(self, output: Tensor, rows: Sequence[Tensor]) -> Chunk:
        slots, counters = self._room(output, len(self._host))
        arrived = self._scratch.next(output)
        arrivals = [self._wire.receive(room, rank) for room, rank in zip(arrived, self._sources, strict=False)]
        works = []
        sums = self._sums.next(output)  # apart from the shared memory: its other ranks do not learn when they have left
        for counter, host, total in zip(counters, self._later, sums, strict=False):
            self._sum_for(host, slots, rows, counter, total)
            works.append(self._wire.send(total, host[self._place]))
        self._sum_for(self._host, slots, rows, counters[-1], output)
        yield
        for room, arrival in zip(arrived, arrivals, strict=False):
            self._wire.wait(arrival)
            output.add_(room)
        self._wire.wait_all(works)

    def _sum_for(self, host: Sequence[int], slots: Slots, rows: Sequence[Tensor], counter: int, total: Tensor) -> None:
        """Write the sum of this host's rows for the rank of this rail on a host to `total`, and give its others theirs."""
        mine = host[self._place]
        for rank in host:
            if rank != mine:
                slots[self._place][rank].copy_(rows[rank])
        self._barrier.arrive(counter)
        self._barrier.wait(counter)
        first, *others = (slots[(self._place + step) % len(slots)][mine] for step in range(1, len(slots)))
        torch.add(rows[mine], first, out=total)
        for row in others:
            total.add_(row)

    def _room(self, like: Tensor, copies: int) -> tuple[Slots, range]:
        """The next part of the memory: by copy and rank, room for chunks of this type and size; and its counters."""
        part = next(self._parts)
        room = self._memory[part].view(like.dtype)[: copies * self._wire.size * like.numel()]
        if room.nbytes > self._touched:  # or the next collectives, and races, would be slow at first
            self._memory[:, self._touched : room.nbytes : PAGESIZE].sum()
            self._touched = room.nbytes
        slots = [copy.unbind() for copy in room.view(copies, self._wire.size, -1)]
        return slots, range(part * self._steps, (part + 1) * self._steps)

    def close(self) -> None:
        """Have the ranks that wait for this one raise."""
        self._barrier.close()
        self._wire.close()


def _layout(hosts: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """Chunks under way, parts of the memory, and bytes of a row's chunk."""
    under_way, turns, chunk = AMONG_OTHERS if len(hosts) > 1 else ALONE
    while chunk * turns * len(hosts[0]) ** 2 * len(hosts) > MOST_BYTES and chunk > SMALLEST_CHUNK:
        chunk //= 2
    return under_way, turns, chunk


def rails(wire: Wire, hosts: Sequence[Sequence[int]]) -> Rails | None:
    """None, on all ranks, where hosts have one rank each, not as many each, or cannot share memory. A collective call."""
    if len(hosts[0]) == 1 or len({len(ranks) for ranks in hosts}) > 1:
        return None
    _, turns, chunk = _layout(hosts)
    (mine,) = (ranks for ranks in hosts if wire.rank in ranks)
    counters, size = turns * len(hosts), turns * len(mine) * wire.size * chunk
    header = -(-header_bytes(len(mine), counters) // PAGESIZE) * PAGESIZE
    shared = shared_memory(wire, mine, header + size)
    if shared is None:
        return None
    memory, processes = shared
    numbers = torch.from_numpy(numpy.asarray(memory))[header:]
    return Rails(wire, hosts, numbers, HostBarrier(wire, processes, memory, counters))
