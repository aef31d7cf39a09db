"""Tasks that whoever waits for them runs: with nothing to compute beside backward, no other thread need wake up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from ..transport.protocol import Transport
from .driver import Driver, OnEnd
from .task import Task


class OnWait(Driver):
    """Starts a task's first request where it is submitted; the rest is done where it is waited for, in the order submitted.

    Waiting out of order would have ranks differ in the order of later rounds; where that may be, tasks have one round.
    `notes`: when a reply comes is noted in each step, not only in those that are measured: on a GPU that is dear.
    """

    def __init__(self, transport: Transport, timeout: timedelta, on_end: OnEnd, *, notes: bool = True) -> None:
        self._transport, self._timeout, self._on_end, self._notes = transport, timeout, on_end, notes

    def submit(self, task: Task) -> WaitedTask:
        """Begin a task; an error is told where it is waited for."""
        waited = WaitedTask(task, self._transport, self._on_end)
        try:
            waited.runs = task.advance(self._transport, 0, self._timeout)
            if self._notes or task.now is not time.perf_counter:
                task.expect_late_wait()
        except Exception as error:
            waited.error = error
        return waited


@dataclass(eq=False)
class WaitedTask:
    """A task that has begun. `runs`: it has not come to its end."""

    task: Task
    transport: Transport
    on_end: OnEnd
    runs: bool = False
    error: Exception | None = None

    def wait(self, timeout: timedelta) -> Tensor:
        """Run the task to its end; raises what `on_end` makes of an error."""
        channel = 1
        try:
            if self.error is not None:
                raise self.error
            while self.runs:
                self.runs = self.task.advance(self.transport, channel, timeout)
                channel += 1
        except Exception as error:
            raise self.on_end(self.task, error) or error from error
        self.on_end(self.task, None)
        assert self.task.result is not None
        return self.task.result
