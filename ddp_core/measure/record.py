"""What one run of a bucket's program cost this rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import add

from ...compress.simulate import Traffic

KINDS = ("encode", "wait", "decode")
NOTHING = (Traffic(), (0.0, 0.0, 0.0))


@dataclass
class Record:
    """Traffic, and host seconds by what they went to.

    `requests`: (scope, payload bytes, sent bytes) of each request of a run. `spans`: (encode, wait or decode; begin; end),
    by time.perf_counter. `earlier`: the traffic of runs that were added, and their seconds, by kind.
    """

    requests: list[tuple[str, int, float]] = field(default_factory=list)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    earlier: tuple[Traffic, tuple[float, ...]] = NOTHING

    @property
    def traffic(self) -> Traffic:
        """What was given to collectives."""
        now = [
            Traffic(1, payload, *((0.0, sent) if scope == "host" else (sent, 0.0)))
            for scope, payload, sent in self.requests
        ]
        return reduce(add, now, self.earlier[0])

    @property
    def encode(self) -> float:
        """Seconds until the first request."""
        return self._seconds("encode")

    @property
    def wait(self) -> float:
        """Seconds from giving a request to a transport until its reply was there."""
        return self._seconds("wait")

    @property
    def decode(self) -> float:
        """Seconds of all arithmetic after the first reply."""
        return self._seconds("decode")

    def _seconds(self, kind: str) -> float:
        earlier = self.earlier[1][KINDS.index(kind)]
        return earlier + sum(end - begin for each, begin, end in self.spans if each == kind)

    def __add__(self, other: Record) -> Record:
        seconds = tuple(self._seconds(kind) + other._seconds(kind) for kind in KINDS)
        return Record(earlier=(self.traffic + other.traffic, seconds))
