"""The transport of requests over ranks, memory and network together, and the time limits of waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch.distributed as dist
from torch import Tensor

from ...compress.protocol.layout import Ranks, Scope
from ...compress.protocol.requests import Request

MESSAGES = -1  # the channel of messages
DEFAULT_TIMEOUT = timedelta(minutes=30)  # of a wait for other ranks
MESSAGE_LIMIT = timedelta(minutes=30)


class Pending(Protocol):
    """A tensor on its way."""

    def wait(self, timeout: timedelta, /) -> Tensor:
        """Return the tensor when it is there; raise RuntimeError if it does not come within the time limit."""


class Reply(Pending, Protocol):
    """The reply to a request. What is not overridden stands for one that nobody notes, and that has nothing to let go of.

    `arrived`: the time of arrival, by the clock of `expect_late_wait` or else time.perf_counter, if it is known already.
    """

    arrived: float | None = None

    def expect_late_wait(self, now: Callable[[], float]) -> None:
        """Note by `now` when it is there, maybe long before somebody waits for it; that costs a thread's attention."""
        return None

    def abandon(self) -> None:
        """Give it up: a connection would stay open with it."""
        return None


class Transport(Protocol):
    """Carries requests among the ranks of `group`. All ranks make the same calls in the same order, but for `abort`.

    What is not overridden stands for one with nothing to prepare, nothing to break, and no memory. Of `group` others ask for
    the ranks and the store alone.
    """

    group: dist.ProcessGroup
    ranks: Ranks

    @property
    def limit(self) -> timedelta:
        """The time limit of messages."""
        return MESSAGE_LIMIT

    @property
    def allocates(self) -> bool:
        """True if the transport may give memory, as far as is known; the same on all ranks. If not, any memory will do."""
        return False

    def arrange(self, per_host: int) -> None:
        """Have so many consecutive ranks be a host, in requests from now on. A collective call."""
        return None

    def open(self, channels: int, scopes: Sequence[Collection[Scope]] = ()) -> None:
        """Have so many channels, on each of which requests keep their order. A collective call.

        `scopes`: of the requests on each channel, by default all ranks.
        """
        return None

    def allocate(self, buckets: Sequence[Sequence[Tensor]]) -> Sequence[Tensor | None]:
        """Memory that it carries best for buckets of these parameters; None: any will do. A collective call."""
        return [None] * len(buckets)

    def allocate_for(self, flat: Tensor) -> Tensor | None:
        """Memory that carries a bucket better than that where it lies; None: there is no better. A collective call."""
        return None

    def start(self, request: Request, channel: int) -> Reply:
        """Give a request to a channel; returns at once."""

    def message(self, request: Request) -> Reply:
        """Give a request of set-up, order, usage or buffers to a channel of its own, always open; returns at once."""
        return self.start(request, MESSAGES)

    def separate(self) -> Transport:
        """Return a transport whose messages do not queue behind this one's requests. A collective call."""
        return self

    def finish(self, deadline: float) -> None:
        """End what connects when it is idle, or at the deadline, by time.monotonic: nobody asks for more."""
        self.abort()

    def abort(self) -> None:
        """Break what connects, so that no rank waits for this one."""
        return None


class Decorated(Transport):
    """A transport around another one, which does what is not overridden; but nothing lies in that one's memory.

    There it would carry what this one does not see.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner, self.group, self.ranks = inner, inner.group, inner.ranks

    def arrange(self, per_host: int) -> None:
        self.inner.arrange(per_host)
        self.ranks = self.inner.ranks

    def open(self, channels: int, scopes: Sequence[Collection[Scope]] = ()) -> None:
        self.inner.open(channels, scopes)

    def start(self, request: Request, channel: int) -> Reply:
        return self.inner.start(request, channel)

    @property
    def limit(self) -> timedelta:
        return self.inner.limit

    def message(self, request: Request) -> Reply:
        return self.inner.message(request)

    def separate(self) -> Transport:
        return self.inner.separate()

    def finish(self, deadline: float) -> None:
        self.inner.finish(deadline)
        self.abort()

    def abort(self) -> None:
        self.inner.abort()


Decorator: TypeAlias = Callable[[Transport], Transport]


def time_limit(timeout: timedelta) -> timedelta:
    """`timeout`. Raises TypeError for a number, whose unit is not told, and ValueError where there would be no time."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is a datetime.timedelta, such as timedelta(seconds=60); got {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout is above 0, such as timedelta(seconds=60); got {timeout!r}")
    return timeout
