"""The cost of one run of a bucket's program on this rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...compress.simulate import Traffic

KINDS = ("encode", "wait", "decode")
NOTHING = (Traffic(), (0.0, 0.0, 0.0))


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
