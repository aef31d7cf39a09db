"""A bucket in memory that all ranks of a host have mapped: whoever waits for numbers of it adds them up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor

from .agreement import Check
from .processes import Processes
from .protocol import Reply

CHECK_SECONDS = 0.2  # between two checks that the other ranks still live


@dataclass(frozen=True, eq=False)
class SharedBuffer:
    """The `memory` of a bucket that all ranks can reach.

    Nobody else has this tensor: who has one that was given, or a view of it, may make torch move that elsewhere
    (`share_memory_`). `sums`: the counters of all buckets that were made together (native/shared_sums.hpp and, with two
    places for each bucket, native/shared_shares.hpp). `place`: the bucket's number among these. `first`: of the ranks that
    have it.
    """

    memory: Tensor
    sums: Any
    processes: Processes
    place: int
    first: int

    def fill(self, flat: Tensor) -> None:
        """Have the numbers of the bucket where the others find them."""
        if flat.data_ptr() != self.memory.data_ptr():
            self.memory.copy_(flat)

    def filled(self, flat: Tensor) -> Tensor:
        """The bucket, with the numbers that the others have left."""
        if flat.data_ptr() != self.memory.data_ptr():
            flat.copy_(self.memory)
        return flat


@dataclass(frozen=True)
class Share:
    """This rank's part of a bucket that lies at `flat`: `numbers`, from its element `first` on."""

    buffer: SharedBuffer
    flat: Tensor
    first: int
    numbers: Tensor

    def sum(self, scale: float) -> Tensor:
        """Add up the share of all ranks, each times `scale`."""
        self.buffer.sums.sum(self.buffer.place, self.first, self.numbers.numel(), scale)
        return self.numbers

    def write(self) -> None:
        """Write it to all others."""
        self.buffer.sums.share(self.buffer.place, self.first, self.numbers.numel())


class SharedReply(Reply):
    """The contributions of all ranks to a `place` of a bucket's counters. Only the ranks that wait spend time.

    `finish`: what these then do, for the reply. `check`: what a wait that takes long does now and then; it may raise.
    """

    def __init__(self, buffer: SharedBuffer, place: int, finish: Callable[[], Tensor], check: Check) -> None:
        self._buffer, self._place, self._finish, self._check = buffer, place, finish, check
        buffer.sums.arrive(place)

    def wait(self, timeout: timedelta) -> Tensor:
        """The reply when all is there; RuntimeError where a rank has ended or gives up, or after the time limit."""
        if not self._buffer.sums.wait(self._place, CHECK_SECONDS):
            self._wait_and_check(timeout)
        return self._finish()

    def _wait_and_check(self, timeout: timedelta) -> None:
        sums, first = self._buffer.sums, self._buffer.first
        deadline = time.monotonic() + timeout.total_seconds()
        ended: list[int] = []
        while not sums.wait(self._place, CHECK_SECONDS):
            self._check()  # first: those that differ give up
            if (rank := sums.given_up()) >= 0:
                raise RuntimeError(f"rank {first + rank} has given up or was closed; see its error")
            if ended:
                raise RuntimeError(f"rank {ended[0]} has ended before the sum was there")
            if time.monotonic() > deadline:
                missing = [first + rank for rank in sums.missing(self._place)]
                late = (
                    f"of ranks {missing} gradients are missing"
                    if missing
                    else "a rank has not done its part of the sum"
                )
                raise RuntimeError(f"timed out after {timeout}: {late}")
            ended = self._buffer.processes.ended()  # what they have left undone may be under way: one more look

    def arrived_at(self) -> float:
        """Return the last rank's arrival, by time.perf_counter: the monotonic clock where memory can be shared."""
        return float(self._buffer.sums.since(self._place))

    def abandon(self) -> None:
        """Have all ranks of the host give it up."""
        self._buffer.sums.give_up()
