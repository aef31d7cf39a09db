"""Plain sums over ranks: with nothing to compute, a bucket needs no program, and no thread that wakes up for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.simulate import Traffic
from ..transport.collectives import start_sum
from ..transport.host_sums import SharedBuffer
from .task import Record

if TYPE_CHECKING:
    from .engine import Engine

POLL_SECONDS = 0.01  # between two looks whether it has arrived


@dataclass(frozen=True)
class Way:
    """How a bucket of our own DDP gets summed, step after step, with no compressor's state.

    `known`: good as long as the handle has this one. `flat`: `buffer` as real numbers. `alone`: it is one bucket of ours,
    of so many `elements`. `shared`: where `buffer` is memory of all ranks. `cost`: of a sum, for this rank. `label`: what
    messages call it.
    """

    known: object
    buffer: Tensor
    flat: Tensor
    shared: SharedBuffer | None
    engine: Engine
    alone: bool
    names: tuple[str, ...]
    elements: int
    cost: Traffic
    label: Callable[[], str]


class Work(Protocol):
    """A sum over ranks that has begun."""

    def wait(self, timeout: timedelta, /) -> object:
        """Return when it is there; raise RuntimeError where it does not come within the time limit."""

    def is_completed(self) -> bool:
        """Whether it is there, or will not come."""

    def arrived_at(self) -> float | None:
        """When it was there, by time.perf_counter, if that is known already."""

    def drop(self) -> None:
        """Give it up."""


class GroupSum:
    """The sum of a tensor, in place, by a process group."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self._arrived: float | None = None
        self._work: dist.Work | None = start_sum(tensor, group)
        self._work.get_future().add_done_callback(self._arrives)

    def _arrives(self, _: torch.futures.Future[list[Tensor]]) -> None:
        """On a thread of the process group, which must not wait: note when."""
        self._arrived = time.perf_counter()

    def wait(self, timeout: timedelta) -> None:
        """Return when it is there."""
        assert self._work is not None
        self._work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether it is there."""
        return self._work is None or self._work.is_completed()

    def arrived_at(self) -> float | None:
        """When it was there."""
        return self._arrived

    def drop(self) -> None:
        """Give it up: its connection would stay open with it."""
        self._work = None


class Sum:
    """A tensor on its way to being summed over ranks, in place; whoever waits for it does what is left to do.

    `begin`: starts it. `result`: what they get. `cost`: what it takes over a network. `fails(error)`: ends whatever else is
    under way and tells what to raise. `work` is None once it was waited for or given up.
    """

    def __init__(
        self,
        begin: Callable[[], Work],
        result: Tensor,
        cost: Traffic,
        timeout: timedelta,
        fails: Callable[[Exception], Exception],
    ) -> None:
        self.record = Record(cost)
        self._result: Tensor | None = result
        self._timeout, self._fails = timeout, fails
        self._began = time.perf_counter()
        self._error: Exception | None = None
        self.work: Work | None = None
        try:
            self.work = begin()
        except Exception as error:  # whoever waits is told
            self._error = error

    def wait(self) -> Tensor:
        """The result when it is there; raises what `fails` tells where it does not come."""
        work, result, self._result = self.work, self._result, None
        try:
            if self._error is not None or work is None or result is None:
                raise self._error or RuntimeError("it was given up")
            work.wait(self._timeout)
        except Exception as error:
            raise self._fails(error) from error
        end = work.arrived_at() or time.perf_counter()
        self.record.wait = end - self._began
        self.record.spans.append(("wait", self._began, end))
        self.work = None
        return result

    def drop(self, deadline: float = 0.0) -> None:
        """Give up what is in flight, unless it arrives by `deadline`."""
        work, self.work = self.work, None
        if work is None:
            return
        while not (there := work.is_completed()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if not there:
            work.drop()
