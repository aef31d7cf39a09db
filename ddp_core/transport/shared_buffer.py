"""A bucket in memory that all ranks of a host have mapped: whoever waits for its sum adds it up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from .agreement import Look, nothing
from .processes import Processes

LOOK_SECONDS = 0.2  # between two looks whether the other ranks still live


class Sums(Protocol):
    """What ranks wait for of all buckets that were made together, by its place: see native/shared_sums.hpp."""

    def arrive(self, place: int) -> None: ...
    def wait(self, place: int, seconds: float) -> bool: ...
    def since(self, place: int) -> float: ...
    def missing(self, place: int) -> list[int]: ...
    def give_up(self) -> None: ...
    def given_up(self) -> int: ...


S = TypeVar("S", bound=Sums, covariant=True)


@dataclass(frozen=True, eq=False)
class SharedBuffer(Generic[S]):
    """A bucket's numbers, `flat`, in memory that all ranks can reach.

    `room`: the same memory, for nobody else: who has `flat`, or a view of it, may make torch move that elsewhere
    (`share_memory_`). `place`: the bucket's number among those that were made together. `first`: of the ranks that have it.
    """

    flat: Tensor
    room: Tensor
    sums: S
    processes: Processes
    place: int
    first: int = 0

    def fill_room(self) -> None:
        """Have the numbers where the others find them."""
        if self.flat.data_ptr() != self.room.data_ptr():
            self.room.copy_(self.flat)

    def filled(self) -> Tensor:
        """`flat`, with the numbers that the others have left."""
        if self.flat.data_ptr() != self.room.data_ptr():
            self.flat.copy_(self.room)
        return self.flat

    def wait(self, place: int, timeout: timedelta, look: Look) -> None:
        """Until it is there; RuntimeError where a rank has ended or gives up, or after the time limit."""
        if not self.sums.wait(place, LOOK_SECONDS):
            self._wait_and_look(place, timeout, look)

    def _wait_and_look(self, place: int, timeout: timedelta, look: Look) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        ended: list[int] = []
        while not self.sums.wait(place, LOOK_SECONDS):
            look()  # first: those that differ give up
            if (rank := self.sums.given_up()) >= 0:
                raise RuntimeError(f"rank {self.first + rank} has given up or was closed; see what it raised")
            if ended:
                raise RuntimeError(f"rank {ended[0]} has ended before the sum was there")
            if time.monotonic() > deadline:
                missing = [self.first + rank for rank in self.sums.missing(place)]
                late = (
                    f"of ranks {missing} gradients are missing"
                    if missing
                    else "a rank has not done its part of the sum"
                )
                raise RuntimeError(f"timed out after {timeout}: {late}")
            ended = self.processes.ended()  # what they have left undone may be under way: one more look


@dataclass(frozen=True)
class SharedSum:
    """The sum of a bucket over ranks, in place, which has begun. It needs no rank's time but that of those who wait.

    `look`: what a wait that takes long does now and then; it may raise.
    """

    buffer: SharedBuffer[Sums]
    look: Look = nothing

    def wait(self, timeout: timedelta) -> Tensor:
        """The bucket when it is there; RuntimeError where a rank has ended or gives up, or after the time limit."""
        self.buffer.wait(self.buffer.place, timeout, self.look)
        return self.buffer.filled()

    def expect_late_wait(self) -> None:
        """The sums note it anyway."""

    def arrived_at(self) -> float:
        """When it was there, by time.perf_counter, which is the monotonic clock where memory can be shared."""
        return self.buffer.sums.since(self.buffer.place)

    def abandon(self) -> None:
        """Have all ranks give it up."""
        self.buffer.sums.give_up()
