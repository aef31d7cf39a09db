"""A bucket in memory that all ranks of a host have mapped: whoever waits for its sum adds it up."""

from __future__ import annotations

import functools
import os
import select
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from .agreement import Look, nothing

LOOK_SECONDS = 0.2  # between two looks whether the other ranks still live


@functools.cache
def extension() -> Any:
    """The sums in C++; ImportError where they were not built."""
    return import_module("._shared", __package__)


def close_files(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


class Processes:
    """The other ranks whose memory is mapped. `processes`: of each."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._ranks: dict[int, int] = {}  # by the number of a file that stands for the process
        weakref.finalize(self, close_files, self._ranks).atexit = False  # others may look until the end
        self._poll = select.poll()
        for rank, process in processes.items():
            file = extension().process_file(process)
            self._ranks[file] = rank
            self._poll.register(file, select.POLLIN)

    def ended(self) -> list[int]:
        """Those whose processes are gone."""
        return sorted(self._ranks[file] for file, _ in self._poll.poll(0))


class Sums(Protocol):
    """The sums of all buckets that were made together, by their places: see native/shared_sums.hpp."""

    def arrive(self, place: int) -> None: ...
    def wait(self, place: int, seconds: float) -> bool: ...
    def since(self, place: int) -> float: ...
    def missing(self, place: int) -> list[int]: ...
    def give_up(self) -> None: ...
    def given_up(self) -> int: ...


@dataclass(frozen=True, eq=False)
class SharedBuffer:
    """A bucket's numbers, `flat`, in memory that all ranks can reach.

    `room`: the same memory, for nobody else: who has `flat`, or a view of it, may make torch move that elsewhere
    (`share_memory_`). `place`: the bucket's number among those that were made together.
    """

    flat: Tensor
    room: Tensor
    sums: Sums
    processes: Processes
    place: int


@dataclass(frozen=True)
class SharedSum:
    """The sum of a bucket over ranks, in place, which has begun. It needs no rank's time but that of those who wait.

    `look`: what a wait that takes long does now and then; it may raise.
    """

    buffer: SharedBuffer
    look: Look = nothing

    def wait(self, timeout: timedelta) -> Tensor:
        """The bucket when it is there; RuntimeError where a rank has ended or gives up, or after the time limit."""
        if not self.buffer.sums.wait(self.buffer.place, LOOK_SECONDS):
            self._wait_and_look(timeout)
        if self.buffer.flat.data_ptr() != self.buffer.room.data_ptr():
            self.buffer.flat.copy_(self.buffer.room)
        return self.buffer.flat

    def _wait_and_look(self, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        ended: list[int] = []
        while not self.buffer.sums.wait(self.buffer.place, LOOK_SECONDS):
            self.look()  # first: those that differ give up
            if (rank := self.buffer.sums.given_up()) >= 0:
                raise RuntimeError(f"rank {rank} has given up or was closed; see what it raised")
            if ended:
                raise RuntimeError(f"rank {ended[0]} has ended before the sum was there")
            if time.monotonic() > deadline:
                missing = self.buffer.sums.missing(self.buffer.place)
                late = (
                    f"of ranks {missing} gradients are missing"
                    if missing
                    else "a rank has not done its part of the sum"
                )
                raise RuntimeError(f"timed out after {timeout}: {late}")
            ended = self.buffer.processes.ended()  # what they have left undone may be under way: one more look

    def expect_late_wait(self) -> None:
        """The sums note it anyway."""

    def arrived_at(self) -> float:
        """When it was there, by time.perf_counter, which is the monotonic clock where memory can be shared."""
        return self.buffer.sums.since(self.buffer.place)

    def abandon(self) -> None:
        """Have all ranks give it up."""
        self.buffer.sums.give_up()
