"""Plain sums over ranks: with nothing to compute, a bucket needs no program, and no thread that wakes up for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..compress.protocol import AllReduce
from ..compress.simulate import traffic
from .collectives import start_sum
from .job import Record

POLL_SECONDS = 0.01  # between two looks whether it has arrived


class Sum:
    """A tensor on its way to being summed over ranks, in place; whoever waits for it does what is left to do.

    `result`: what they get. `fails(error)`: ends whatever else is under way and tells what to raise.
    """

    def __init__(
        self,
        tensor: Tensor,
        result: Tensor,
        group: dist.ProcessGroup,
        timeout: timedelta,
        fails: Callable[[Exception], Exception],
    ) -> None:
        self.record = Record(traffic(AllReduce(tensor, "sum"), group.size()))
        self._result, self._timeout, self._fails = result, timeout, fails
        self._began = time.perf_counter()
        self._arrived: float | None = None
        self._error: Exception | None = None
        self._work: dist.Work | None = None
        try:
            self._work = start_sum(tensor, group)
            self._work.get_future().add_done_callback(self._arrives)
        except Exception as error:  # whoever waits is told
            self._error = error

    def _arrives(self, _: torch.futures.Future[list[Tensor]]) -> None:
        """On a thread of the process group, which must not wait: note when."""
        self._arrived = time.perf_counter()

    def wait(self) -> Tensor:
        """The result when it is there; raises what `fails` tells where it does not come."""
        work = self._work
        try:
            if self._error is not None or work is None:
                raise self._error or RuntimeError("it was given up")
            work.wait(self._timeout)
        except Exception as error:
            raise self._fails(error) from error
        end = self._arrived or time.perf_counter()
        self.record.wait = end - self._began
        self.record.spans.append(("wait", self._began, end))
        self._work = None
        return self._result

    @property
    def under_way(self) -> bool:
        """Whether it has been neither waited for nor given up."""
        return self._work is not None

    def drop(self, deadline: float = 0.0) -> None:
        """Give up what is in flight, whose connection would stay open with it, unless it arrives by `deadline`."""
        while self._work is not None and not self._work.is_completed() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._work = None
