"""All-gather and reduce-scatter over hosts with several ranks, which share memory: a block enters a host once.

The ranks of one place on every host are a rail. A block goes along its rail alone, straight into memory that all ranks of
the receiving host have mapped, and these copy it out. A reduce-scatter is the mirror image: the ranks of a host put their
rows into shared memory, each adds up those that its rail is to have, and sends the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from mmap import PAGESIZE

import numpy
import torch
from torch import Tensor

from .chunks import Chunk, Scratch, run, split
from .hosts import shared_memory
from .mates import Mates, header_bytes
from .staggered import Staggered
from .wire import Wire

MOST_BYTES = 2**26  # of a host's shared memory
ALONE = 2, 4, 2**20  # of a host without others: chunks under way, parts of the memory, bytes of a row's chunk
AMONG_OTHERS = 2, 3, 2**18
SMALLEST_CHUNK = 2**12


class Rails:
    """Both over the ranks of `hosts`, as many on each, called as `Staggered` is. `memory`: what each host's share.

    Chunks take turns in the parts of the memory. A part is free again once all mates have come, with a later chunk, to where
    they only come when they have read this one: with other hosts, the next one's blocks; without, the beginning of the chunk
    that is as many further on as are under way. `mates` has a place for each step of each part.
    """

    def __init__(self, wire: Wire, hosts: Sequence[Sequence[int]], memory: Tensor, mates: Mates) -> None:
        self._wire, self._mates = wire, mates
        (mine,) = (host for host, ranks in enumerate(hosts) if wire.rank in ranks)
        self._place = place = hosts[mine].index(wire.rank)
        self._host = hosts[mine]
        later = [hosts[(mine + step) % len(hosts)] for step in range(1, len(hosts))]
        self._earlier = later[::-1]  # hosts, in the order in which their blocks arrive
        self._targets, self._sources = [ranks[place] for ranks in later], [ranks[place] for ranks in self._earlier]
        rail = {wire.rank, *self._targets}
        self._others = [rank for rank in range(wire.size) if rank not in rail]  # whose rows mates add up
        self._under_way, turns, chunk = _layout(hosts)
        self._steps = len(hosts)
        self._summed, self._gathered = chunk, chunk * len(self._host)
        self._memory = memory.view(turns, -1)
        self._parts: Iterator[int] = (number % turns for number in count())
        self._scratch, self._sums = (Scratch(max(1, len(self._targets)), chunk, self._under_way) for _ in range(2))
        self._swap = Staggered(wire).all_to_all

    def all_gather(self, outputs: Sequence[Tensor], block: Tensor) -> None:
        parts = zip(*(split(output, self._gathered) for output in outputs), strict=True)
        blocks = split(block, self._gathered)
        run((self._gather(out, part) for out, part in zip(parts, blocks, strict=True)), self._under_way)

    def _gather(self, outputs: Sequence[Tensor], block: Tensor) -> Chunk:
        part = next(self._parts)
        (slots,) = self._slots(part, block, 1)
        places = range(part * self._steps, (part + 1) * self._steps)
        arrivals = [self._wire.receive(slots[source], source) for source in self._sources]
        slots[self._wire.rank].copy_(block)
        works = [self._wire.send(slots[self._wire.rank], target) for target in self._targets]
        self._mates.come(places[0])
        yield
        for step, host in enumerate([self._host, *self._earlier]):
            if step:
                self._wire.wait(arrivals[step - 1])
                self._mates.come(places[step])
            self._mates.wait(places[step])
            for rank in host:
                outputs[rank].copy_(slots[rank])
        self._wire.wait_all(works)

    def all_to_all(self, outputs: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        self._swap(outputs, rows)  # no two ranks of a host want the same

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor]) -> None:
        parts = zip(*(split(row, self._summed) for row in rows), strict=True)
        outputs = split(output, self._summed)
        run((self._reduce(out, part) for out, part in zip(outputs, parts, strict=True)), self._under_way)

    def _reduce(self, output: Tensor, rows: Sequence[Tensor]) -> Chunk:
        part, arrived = next(self._parts), self._scratch.next(output)
        slots, place = self._slots(part, output, len(self._host)), part * self._steps
        arrivals = [self._wire.receive(room, rank) for room, rank in zip(arrived, self._sources, strict=False)]
        for rank in self._others:
            slots[self._place][rank].copy_(rows[rank])
        self._mates.come(place)
        self._mates.wait(place)
        works = []
        sums = self._sums.next(output)  # apart from the shared memory: mates do not learn when they have left
        for target, total in zip(self._targets, sums, strict=False):
            self._host_sum(slots, rows, target, total)
            works.append(self._wire.send(total, target))
        self._host_sum(slots, rows, self._wire.rank, output)
        yield
        for room, arrival in zip(arrived, arrivals, strict=False):
            self._wire.wait(arrival)
            output.add_(room)
        self._wire.wait_all(works)

    def _host_sum(self, slots: Sequence[Sequence[Tensor]], rows: Sequence[Tensor], rank: int, total: Tensor) -> None:
        """Write the sum of this host's rows for a rank to `total`."""
        first, *others = (slots[(self._place + step) % len(slots)][rank] for step in range(1, len(slots)))
        torch.add(rows[rank], first, out=total)
        for row in others:
            total.add_(row)

    def _slots(self, part: int, like: Tensor, places: int) -> Sequence[Sequence[Tensor]]:
        """By place and rank, room for chunks of this type and size, in a part of the memory."""
        room = self._memory[part].view(like.dtype)[: places * self._wire.size * like.numel()]
        return [place.unbind() for place in room.view(places, self._wire.size, -1)]


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
    places, size = turns * len(hosts), turns * len(mine) * wire.size * chunk
    header = -(-header_bytes(len(mine), places) // PAGESIZE) * PAGESIZE
    shared = shared_memory(wire, mine, header + size)
    if shared is None:
        return None
    memory, processes = shared
    numbers = torch.from_numpy(numpy.asarray(memory))[header:]
    return Rails(wire, hosts, numbers, Mates(wire, processes, memory, places))
