"""What one run of a bucket's program cost this rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ...compress.protocol import Request
from ...compress.simulate import Traffic


@dataclass
class Record:
    """Traffic, and host seconds by what they went to.

    `encode`: until the first request. `wait`: from giving a request to a transport until its reply was there. `decode`: all
    arithmetic after the first reply. `spans`: (which of them, begin, end) of one run, by time.perf_counter.
    """

    rounds: int = 0
    payload_bytes: int = 0
    sent_bytes: float = 0.0
    host_bytes: float = 0.0
    encode: float = 0.0
    wait: float = 0.0
    decode: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def traffic(self) -> Traffic:
        """What was given to collectives."""
        return Traffic(self.rounds, self.payload_bytes, self.sent_bytes, self.host_bytes)

    def sent(self, request: Request, members: int) -> None:
        """Count a request of so many ranks."""
        self.rounds += 1
        self.payload_bytes += request.tensor.nbytes
        if request.scope == "host":
            self.host_bytes += request.sent_bytes(members)
        else:
            self.sent_bytes += request.sent_bytes(members)

    def spent(self, kind: str, begin: float, end: float | None = None) -> float:
        """Count the seconds from `begin` to `end`, by default until now; returns the end."""
        end = time.perf_counter() if end is None else end
        setattr(self, kind, getattr(self, kind) + end - begin)
        self.spans.append((kind, begin, end))
        return end

    def add(self, other: Record) -> None:
        """Count what another one counts, but for its spans."""
        for kind in ("rounds", "payload_bytes", "sent_bytes", "host_bytes", "encode", "wait", "decode"):
            setattr(self, kind, getattr(self, kind) + getattr(other, kind))
