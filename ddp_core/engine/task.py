"""A task: a program on its way from request to request."""

from __future__ import annotations

import inspect
import time
from datetime import timedelta

import torch
from torch import Tensor

from ...compress.protocol import Program, Request
from ...compress.together import Running
from ..measure.record import Record
from ..transport.protocol import Pending, Transport


class ProgramError(RuntimeError):
    """A program or its communication failed; the message begins with the label of its bucket."""


class Task:
    """A program, what it asks for, and what is in flight for it.

    `label`: what messages call it. `future`: of the result, where somebody waits without running the task.
    """

    def __init__(self, program: Program[Tensor], label: str) -> None:
        self.label = label
        self.record = Record()
        self.closed = False
        self.future: torch.futures.Future[Tensor] | None = None
        self._program = program
        self._running: Running | None = None
        self._pending: Pending | None = None
        self._since = 0.0

    @property
    def begun(self) -> bool:
        """Whether it has run to its first request, or to its end."""
        return self._running is not None

    @property
    def request(self) -> Request | None:
        """What it asks for now; None before it began and after its end."""
        return None if self._running is None else self._running.request

    @property
    def result(self) -> Tensor:
        """What the program returned."""
        assert self._running is not None
        result: Tensor = self._running.result
        return result

    def begin(self) -> None:
        """Run to the first request."""
        began = time.perf_counter()
        self._running = Running(self._program)
        self._since = self.record.spent("encode", began)

    def send(self, transport: Transport, channel: int) -> None:
        """Give the request to a transport."""
        assert self._running is not None
        assert self._running.request is not None
        request = self._running.request
        self.record.sent(request, transport.members(request.scope))
        self._since = time.perf_counter()
        self._pending = transport.start(request, channel)

    def receive(self, timeout: timedelta) -> None:
        """Wait for the reply, and run on with it to the next request or the end."""
        pending, running = self._pending, self._running
        if pending is None or running is None:
            raise RuntimeError("it was given up")
        reply = pending.wait(timeout)
        self._pending = None
        self.record.spent("wait", self._since, pending.arrived_at())
        self._since = time.perf_counter()
        running.advance(reply)
        if running.result is not reply:  # else there was nothing to compute
            self._since = self.record.spent("decode", self._since)

    def close(self) -> None:
        """Drop the program and what it waits for, whose connection would stay open with it.

        A program that is running in another thread just now is dropped by that thread.
        """
        self.closed = True
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon()
        if inspect.getgeneratorstate(self._program) != inspect.GEN_RUNNING:
            self._program.close()
