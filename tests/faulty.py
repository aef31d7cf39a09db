"""Injected failures, for tests of everything above a transport: what a rank, a round and a step are made to suffer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from torch import Tensor

from gradwire.compress.protocol.requests import Request
from gradwire.ddp_core.transport.protocol import Decorated, Decorator, Reply, Transport


@dataclass(frozen=True)
class Fault:
    """What goes wrong on rank `rank` with request number `turn` of round `round`; a bucket makes one request a round.

    `kind`: raise: it cannot be started. break: its reply does not come, and the wait for it raises. hang: the wait takes the
    whole time limit. drop: it is never started, so the others wait. call: `action` runs before it is started.
    """

    kind: Literal["raise", "break", "hang", "drop", "call"]
    rank: int = 0
    turn: int = 0
    round: int = 0
    action: Callable[[], None] | None = None


class Throughout(Decorated):
    """A transport around another one that takes part in all that goes through memory, too."""

    @property
    def allocates(self) -> bool:
        return self.inner.allocates

    def allocate(self, buckets: Sequence[Sequence[Tensor]]) -> Sequence[Tensor | None]:
        return self.inner.allocate(buckets)

    def allocate_for(self, flat: Tensor) -> Tensor | None:
        return self.inner.allocate_for(flat)


class Faulty(Throughout):
    """A transport with faults."""

    def __init__(self, inner: Transport, faults: Sequence[Fault]) -> None:
        super().__init__(inner)
        self._faults = {(fault.round, fault.turn): fault for fault in faults if fault.rank == inner.group.rank()}
        self._turns: Counter[int] = Counter()  # requests so far, by round

    def start(self, request: Request, channel: int) -> Reply:
        """As the inner one, unless it is this request's turn to fail."""
        fault = self._faults.get((channel, self._turns[channel]))
        self._turns[channel] += 1
        if fault is None:
            return self.inner.start(request, channel)
        if fault.kind == "raise":
            raise InjectedError(f"round {channel + 1} was made to fail")
        if fault.kind == "call" and fault.action is not None:
            fault.action()
        return Lost(fault, None if fault.kind == "drop" else self.inner.start(request, channel))


class InjectedError(RuntimeError):
    """On purpose."""


class Lost(Reply):
    """What is in flight, if it is, and will not arrive but for a fault that only calls."""

    def __init__(self, fault: Fault, real: Reply | None) -> None:
        self._fault, self._real = fault, real

    def wait(self, timeout: timedelta) -> Tensor:
        """Raise InjectedError, at once or at the time limit."""
        if self._fault.kind == "call" and self._real is not None:
            return self._real.wait(timeout)
        if self._fault.kind != "break":
            time.sleep(timeout.total_seconds())
        raise InjectedError(f"a reply was made to {self._fault.kind}")

    def abandon(self) -> None:
        """Give the real one up."""
        if self._real is not None:
            self._real.abandon()


def faulty(*faults: Fault) -> Decorator:
    """A decorator of transports that injects these faults."""
    return lambda inner: Faulty(inner, faults)
