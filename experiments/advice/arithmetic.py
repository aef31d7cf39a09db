"""The time of a compressor's arithmetic on this machine, per element, while all its ranks compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...compress import Compressor, Layout, traits_of
from ...compress.protocol.requests import next_request
from ...compress.simulate import alike
from ...compress.state.agreed import choices
from ...compress.state.shares import placed_on_hosts
from ...ddp_core.measure.clock import Clock
from ...ddp_core.memory.bucket_memory import BucketMemory

SAMPLE = 2**24  # elements that a method is timed on, about
STEADY = 2**24  # a step after warm-ups; real kernels count from it
REPEATS = 5  # measured runs of a bucket, behind one that is not counted
SMALLEST_POOL, POOL, LARGEST_POOL = 16, 2**21, 2**25  # elements


@dataclass(frozen=True)
class Arithmetic:
    """Seconds an element. `phases`: before the first request, between each two, behind the last. `cores`: busy meanwhile.

    `launches`: seconds of the host a bucket, to launch all of that on a GPU.
    """

    phases: tuple[float, ...]
    cores: float
    launches: float = 0.0


NONE = Arithmetic((0.0, 0.0), 0.0)


def sampled(layouts: Sequence[Layout], elements: int = SAMPLE) -> list[Layout]:
    """Some of the layouts, spread evenly, that have about so many elements together; at least one.

    >>> def of(numel): return Layout((str(numel),), ((numel,),), torch.float32, torch.device("cpu"))
    >>> [layout.numel for layout in sampled([of(10), of(20), of(30), of(40)], 50)]
    [20, 40]
    """
    total = sum(layout.numel for layout in layouts)
    count = max(1, min(len(layouts), round(len(layouts) * elements / max(1, total))))
    return [layouts[(2 * place + 1) * len(layouts) // (2 * count)] for place in range(count)]


def measured_arithmetic(compressor: Compressor, layouts: Sequence[Layout], pool: Tensor, clock: Clock) -> Arithmetic:
    """Return the arithmetic of a compressor on buckets of these layouts, whose gradients come from `pool`, flat.

    Replies are those of ranks that all do as this one, and take no time here.
    """
    if traits_of(compressor).averages:
        return NONE
    totals: list[float] = []
    elements, processor = 0, 0.0
    for layout in layouts:
        placed = replace(layout, ranks=placed_on_hosts(compressor, layout.ranks))
        found, worked = _bucket(compressor, placed, pool, clock)
        totals = list(map(sum, _alike([totals, found])))  # a bucket may have fewer rounds than another one
        elements, processor = elements + layout.numel, processor + worked
    on_cuda, seconds = layouts[0].device.type == "cuda", sum(totals)
    cores = 1.0 if on_cuda else processor / seconds if seconds else 0.0
    return Arithmetic(tuple(total / elements for total in totals), cores)


def _alike(runs: Sequence[Sequence[float]]) -> Iterator[tuple[float, ...]]:
    """The seconds of each phase in all runs; where one has fewer phases, zeros stand before its last."""
    count = max(map(len, runs))
    return zip(*([*each[:-1], *[0.0] * (count - len(each)), *each[-1:]] for each in runs), strict=True)


def _bucket(compressor: Compressor, layout: Layout, pool: Tensor, clock: Clock) -> tuple[list[float], float]:
    """Median seconds of each phase, and the processor's of them all together."""
    memory = BucketMemory(compressor, layout, STEADY)
    for choice in choices(memory.state):
        choice.fixed = choice.last  # as predictions have it; there is no one to agree with
    flat = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
    runs, processor = [], []
    for turn in range(1 + REPEATS):
        pool.sum()  # computation goes over other memory between two averages: what they left in caches is gone
        _fill(flat, pool, turn)
        clock.synchronize()
        marks = list(_phases(memory, layout, flat, STEADY + turn, clock))
        clock.synchronize()
        memory.end_step(keep=True, any_rank_owes=False)  # or the next one would write over what it reads
        runs.append([clock.seconds(begin, end) for begin, end, _ in marks])
        processor.append(sum(worked for _, _, worked in marks))
    medians = [statistics.median(phase) for phase in _alike(runs[1:])]  # a method may alternate
    return medians, statistics.median(processor[1:])


def _phases(
    memory: BucketMemory, layout: Layout, flat: Tensor, step: int, clock: Clock
) -> Iterator[tuple[float, float, float]]:
    """(begin, end, processor's seconds) of what a program computes between its requests."""
    program = memory.reduce(flat, step, memory.stateful)
    reply: Tensor | None = None
    while True:
        begin, worked = clock.now(), time.process_time()
        request, _ = next_request(program, reply)
        yield begin, clock.now(), time.process_time() - worked
        if request is None:
            return
        reply = alike(request, layout.ranks)


def _fill(flat: Tensor, pool: Tensor, turn: int) -> None:
    """Numbers of the pool, others at each turn."""
    for piece in flat.split(len(pool) // 2):
        piece.copy_(pool[turn : turn + len(piece)])


def copy_seconds(layout: Layout, pool: Tensor, clock: Clock) -> float:
    """Seconds an element of copying gradients into a bucket."""
    flat = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
    source = torch.empty_like(flat)
    found = []
    for turn in range(1 + REPEATS):
        _fill(source, pool, turn)
        clock.synchronize()
        begin = clock.now()
        flat.copy_(source)
        end = clock.now()
        clock.synchronize()
        found.append(clock.seconds(begin, end))
    return statistics.median(found[1:]) / layout.numel


def gradient_pool(device: torch.device, dtype: torch.dtype, elements: int = POOL) -> Tensor:
    """About so many numbers with a heavy tail, as gradients have; the same everywhere, from a generator of their own."""
    numbers = torch.randn(max(SMALLEST_POOL, min(elements, POOL)), generator=torch.Generator().manual_seed(0))
    repeated = numbers.pow_(3).mul_(1e-3).to(device=device, dtype=dtype)
    return repeated.repeat(max(1, min(elements, LARGEST_POOL) // POOL))
