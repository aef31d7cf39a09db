"""An emulated link by its rate alone: what arrives is held back until a slower link would have carried it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch import Tensor

from ...compress.protocol.requests import Request
from .protocol import Decorated, Reply, Transport


class Link:
    """A link that carries one thing after the other at `rate` bytes a second. Threads may share it."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def due(self, sent_bytes: float) -> float:
        """Return the time (time.monotonic) at which the link has carried `sent_bytes`, behind all that was sent before."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + sent_bytes / self._rate
            return self._free_at


class Paced(Decorated):
    """A transport whose requests take at least what `link`, this rank's own, would need for the bytes that it sends.

    For transports whose wait blocks the host.
    """

    def __init__(self, inner: Transport, link: Link) -> None:
        super().__init__(inner)
        self._link = link

    def start(self, request: Request, channel: int) -> Reply:
        """Begin now, both on the inner transport and on the link; inside a host there is none."""
        pending = self.inner.start(request, channel)
        if request.scope in ("host", "self"):
            return pending
        return PacedPending(pending, self._link.due(request.sent_bytes(len(self.ranks.members(request.scope)))))


class PacedPending(Reply):
    """A request that is over when it really is, and not before `due` (time.monotonic)."""

    def __init__(self, real: Reply, due: float) -> None:
        self._real, self.due = real, due

    def wait(self, timeout: timedelta) -> Tensor:
        """Wait for both; the time limit is that of the real one."""
        reply, real = self._real.wait(timeout), self._real.arrived
        time.sleep(max(0.0, self.due - time.monotonic()))
        # time.perf_counter is the monotonic clock on Linux
        self.arrived = None if real is None else max(real, self.due)
        return reply

    def expect_late_wait(self, now: Callable[[], float]) -> None:
        self._real.expect_late_wait(now)

    def abandon(self) -> None:
        self._real.abandon()
