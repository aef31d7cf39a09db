"""What one run of a bucket's program cost this rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ...compress.protocol import Request
from ...compress.simulate import Traffic


@dataclass
class Record:
    """Traffic, and host seconds by what they went to.

    `spans`: (encode, wait or decode; begin; end) of one run, by time.perf_counter. `added`: what was added from others.
    """

    rounds: int = 0
    payload_bytes: int = 0
    sent_bytes: float = 0.0
    host_bytes: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    added: Counter[str] = field(default_factory=Counter)

    @property
    def traffic(self) -> Traffic:
        """What was given to collectives."""
        return Traffic(self.rounds, self.payload_bytes, self.sent_bytes, self.host_bytes)

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
        return self.added[kind] + sum(end - begin for each, begin, end in self.spans if each == kind)

    def sent(self, request: Request, members: int) -> None:
        """Count a request of so many ranks."""
        self.rounds += 1
        self.payload_bytes += request.tensor.nbytes
        if request.scope == "host":
            self.host_bytes += request.sent_bytes(members)
        else:
            self.sent_bytes += request.sent_bytes(members)

    def add(self, other: Record) -> None:
        """Count what another one counts, but for its spans."""
        for count in ("rounds", "payload_bytes", "sent_bytes", "host_bytes"):
            setattr(self, count, getattr(self, count) + getattr(other, count))
        for kind in ("encode", "wait", "decode"):
            self.added[kind] += getattr(other, kind)
