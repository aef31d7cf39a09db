"""Tasks that whoever waits for them runs: with nothing to compute beside backward, no other thread need wake up."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

from torch import Tensor

from ..transport.protocol import Transport
from .driver import OnEnd
from .task import Task


class OnWait:
    """Starts a task's first request where it is submitted; the rest is done where it is waited for, in the order submitted.

    Waiting out of order would have ranks differ in the order of later rounds.
    """

    def __init__(self, transport: Transport, timeout: timedelta, on_end: OnEnd) -> None:
        self._transport, self._timeout, self._on_end = transport, timeout, on_end
        self._waited: list[WaitedTask] = []

    def submit(self, task: Task) -> WaitedTask:
        """Begin a task; an error is told where it is waited for."""
        self._waited = [other for other in self._waited if not other.over]
        waited = WaitedTask(task, self._transport, self._on_end)
        self._waited.append(waited)
        return waited

    def rest(self, deadline: float) -> bool:
        """What nobody waits for does not run."""
        return True

    def close(self, deadline: float) -> None:
        """Give up what nobody has waited for, unless it arrives in time."""
        for waited in self._waited:
            waited.drop(deadline)
        self._waited = []


class WaitedTask:
    """A task that has begun. `over`: it was waited for, or given up."""

    def __init__(self, task: Task, transport: Transport, on_end: OnEnd) -> None:
        self._task, self._transport, self._on_end = task, transport, on_end
        self._round = 0
        self._error: Exception | None = None
        self.over = False
        try:
            task.begin()
            self._send()
        except Exception as error:
            self._error = error

    def _send(self) -> None:
        if self._task.request is not None:
            self._task.send(self._transport, self._round)
            self._round += 1

    def wait(self, timeout: timedelta) -> Tensor:
        """Run the task to its end; raises what `on_end` makes of an error."""
        self.over = True
        try:
            if self._error is not None or self._task.closed:
                raise self._error or RuntimeError("it was given up")
            while self._task.request is not None:
                self._task.receive(timeout)
                self._send()
        except Exception as error:
            raise self._on_end(self._task, error) or error from error
        self._on_end(self._task, None)
        return self._task.result

    def drop(self, deadline: float) -> None:
        """Let the first reply arrive until `deadline`, by time.monotonic, then give the task up."""
        if not (self.over or self._task.closed or self._error):
            with suppress(Exception):  # nobody has asked for it
                self._task.receive(timedelta(seconds=max(0.0, deadline - time.monotonic())))
        self._task.close()

    def arrived_at(self) -> float | None:
        """When its last reply was there, once it was waited for."""
        return self._task.record.spans[-1][1] if self.over else None

    def abandon(self) -> None:
        """Give it up."""
        self._task.close()
