"""The record of one synchronized step: what is noted while it runs, and what its buckets' programs cost on this rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ...compress.simulate import Traffic
from ...compress.state.gauge import Gauge
from .clock import Clock

KINDS = ("encode", "wait", "decode")
NOTHING = (Traffic(), (0.0, 0.0, 0.0))


@dataclass(frozen=True)
class BucketStats:
    """The cost of one bucket on this rank in the last synchronized step.

    Attributes:
        parameters: names of the bucket's parameters.
        elements: the number of gradient elements.
        record: traffic and seconds.
        feedback: measurements of error feedback; None for compressors without it.
        element_bytes: bytes of a gradient element, uncompressed.
        given: the time, by time.perf_counter, at which the averager received the bucket.
        per_host: ranks of a host, if the bucket travels in two levels; else 1.
    """

    parameters: tuple[str, ...]
    elements: int
    record: Record
    feedback: Gauge | None = None
    element_bytes: int = 4
    given: float = field(default_factory=time.perf_counter)
    per_host: int = 1


@dataclass(eq=False)
class Step:
    """A synchronized step. It takes a mark a bucket, not a parameter, so it is always kept.

    `number`: from 1, steps before a checkpoint counted; 0 until its first bucket is sent. `forward`: when the last one
    before it began and ended. `costs`: of programs, in the order sent. `ready`, `launched`, `done`: by bucket, when its last
    gradient was there, when it was given to what averages it, and when its average was there, by time.perf_counter.
    `interval`: seconds from the first bucket of the step before to its own, 0 where there was none. `now`: takes the marks
    of what a planner or a watch wants to know of it (`clock.py`), which are time.perf_counter's as well. `overlapped`:
    averages are handed out after backward. `setup`: the compressor and the number of its stages that
    have begun; equal ones send alike.
    """

    number: int = 0
    forward: tuple[float, float] = (0.0, 0.0)
    costs: list[BucketStats] = field(default_factory=list)
    ready: dict[int, float] = field(default_factory=dict)
    launched: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    last_launch: float = 0.0
    computed: float = 0.0
    ended: float = 0.0
    interval: float = 0.0
    now: Callable[[], float] = time.perf_counter
    overlapped: bool = False
    setup: object = None

    def watch(self, index: int, average: object) -> None:
        """Note when the average of somebody's hook is there, if it is a future; those of programs tell by their spans."""

        def end(_: object) -> None:
            self.done.setdefault(index, time.perf_counter())

        if isinstance(average, torch.futures.Future):
            average.add_done_callback(end)

    @property
    def marks(self) -> Iterator[float]:
        """The marks of its programs, but for those that others ran: nothing is known of their time."""
        for cost in self.costs:
            if cost.record.spans:
                yield cost.given
            for _, begin, end in cost.record.spans:
                yield from (begin, end)

    def read(self, clock: Clock) -> Step | None:
        """Return its programs with marks in seconds by a device's clock; None where that has not taken all of them.

        Waits until the device has reached the marks.
        """
        first = next(self.marks, None)
        if first is None or not all(map(clock.took, self.marks)):
            return None
        since, costs = partial(clock.seconds, first), []
        for cost in self.costs:
            spans = [(kind, since(begin), since(end)) for kind, begin, end in cost.record.spans]
            record = Record(cost.record.requests, spans, cost.record.earlier)
            costs.append(replace(cost, record=record, given=since(cost.given) if spans else 0.0))
        return Step(self.number, costs=costs, interval=self.interval, overlapped=self.overlapped, setup=self.setup)


@dataclass
class Record:
    """Traffic, and host seconds by what they went to.

    `requests`: (scope, payload bytes, sent bytes) of each request of a run. `spans`: (encode, wait or decode; begin; end),
    marks of a clock (`clock.py`). `earlier`: the traffic of runs that were added, and their seconds, by kind.
    """

    requests: list[tuple[str, int, float]] = field(default_factory=list)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    earlier: tuple[Traffic, tuple[float, ...]] = NOTHING

    @property
    def traffic(self) -> Traffic:
        """The traffic that was given to collectives."""
        return summed([self]).earlier[0]

    @property
    def encode(self) -> float:
        """Seconds before the first request."""
        return summed([self]).earlier[1][0]

    @property
    def wait(self) -> float:
        """Seconds of waits for replies, from the request on."""
        return summed([self]).earlier[1][1]

    @property
    def decode(self) -> float:
        """Seconds of all arithmetic after the first reply."""
        return summed([self]).earlier[1][2]


def replies(records: Iterable[Record]) -> Iterator[tuple[float, float, str, float]]:
    """(begin, end, scope, bytes sent) of each request that has had its reply; several may be under way at once."""
    for record in records:
        waits = [(begin, end) for kind, begin, end in record.spans if kind == "wait"]
        for (begin, end), (scope, _, sent) in zip(waits, record.requests, strict=False):
            yield begin, end, scope, sent


def link_use(records: Iterable[Record]) -> tuple[float, float]:
    """(seconds in which something was under way between hosts, bytes that left this rank there)."""
    between = sorted((begin, end, sent) for begin, end, scope, sent in replies(records) if scope != "host" and sent)
    held, free = 0.0, -math.inf
    for begin, end, _ in between:
        held += max(0.0, end - max(begin, free))
        free = max(free, end)
    return held, sum(sent for _, _, sent in between)


def summed(records: Iterable[Record]) -> Record:
    """The sum of what runs cost, in one go: there is one for each bucket of each step."""
    rounds, payload_bytes, sent_bytes, host_bytes = 0, 0, 0.0, 0.0
    seconds = dict.fromkeys(KINDS, 0.0)
    for record in records:
        before, times = record.earlier
        rounds += before.rounds + len(record.requests)
        payload_bytes += before.payload_bytes
        sent_bytes += before.sent_bytes
        host_bytes += before.host_bytes
        for scope, payload, sent in record.requests:
            payload_bytes += payload
            if scope == "host":
                host_bytes += sent
            else:
                sent_bytes += sent
        for kind, earlier in zip(KINDS, times, strict=True):
            seconds[kind] += earlier
        for kind, begin, end in record.spans:
            seconds[kind] += end - begin
    return Record(earlier=(Traffic(rounds, payload_bytes, sent_bytes, host_bytes), tuple(seconds.values())))
