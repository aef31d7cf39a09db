"""Tasks on CUDA: a side stream, on which the rounds of neighbouring tasks take turns.

Round j of a task goes out behind round j - 1 of the next task: while the link carries one, the stream decodes the other.
All go to one channel, on which the host alone gives the order. Sums of our own DDP run where they are waited for, not here.

    submit A: A1 | submit B: B1 A2 | submit C: C1 B2 A3

The order depends on the order of tasks and waits alone, which is the same on every rank: the reducer waits for buckets in
their order, `overlap` and the hook of torch's DDP call `send_all` before any wait, and FSDP2 waits for a module's tasks in
their order before the next module's come.
"""

from __future__ import annotations

import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from ..transport.protocol import Pending, Transport
from .lanes import Driver, FuturePending, OnEnd, Task

NO_LIMIT = timedelta()  # the group's own watchdog keeps it


class SideStream(Driver):
    """Carries tasks on when another one is submitted, and to their end when they are waited for, on a stream of its own.

    With NCCL, waiting for a collective orders streams: neither the host nor the backward stream is held up. With Gloo the
    host waits. Replies of a measured step are noted when they come, but for lent memory: this stream gets to them behind
    the next gradient.
    """

    def __init__(self, transport: Transport, device: torch.device, on_end: OnEnd) -> None:
        self._transport, self._device, self._on_end = transport, device, on_end
        self._stream = torch.cuda.Stream(device, priority=-1)  # small kernels that a collective waits for go first
        self._gradients = torch.cuda.Event()  # recorded again for each task: who waits, waits for what was there then
        self._running: list[QueuedTask] = []
        self._training: torch.cuda.Stream | None = None  # the stream that submitted last
        transport.open(1)

    def submit(self, task: Task) -> Pending:
        """Send a task's first round behind the gradient's kernels, then the next ones of those before, the newest first.

        Nobody says when torch waits for a future: whoever asked for one calls `send_all` behind the last task, or waits for
        it in Python.
        """
        future, queued = None, QueuedTask(task, self, torch.cuda.Event())
        if task.needs_future:  # making and filling one is dear
            task.future = future = Awaited(devices=[self._device])  # `on_end` sets its result
            future.queued = weakref.ref(queued)
        task.left_to_waiter = True  # it goes on when this thread comes back
        self._running.append(queued)
        self._training = self.current()
        self._gradients.record(self._training)
        self._gradients.wait(self._stream)
        with torch.cuda.stream(self._stream), _full_precision():
            self._carry_on()
        return queued if future is None else FuturePending(future)

    def finish(self, queued: QueuedTask) -> None:
        """Queue the rest of a task; all others move on as far."""
        with torch.cuda.stream(self._stream), _full_precision():
            while queued.runs:
                self._carry_on()

    def send_all(self) -> None:
        """Queue the rest of all tasks, in an order that depends on that of the tasks alone."""
        with torch.cuda.stream(self._stream), _full_precision():
            while self._running:
                self._carry_on()

    def follow(self) -> None:
        """Have the current stream wait for all that is queued here, and on the stream of training.

        Training changes state between steps, also behind the last task, and a thread that saves may have another stream.
        """
        current = self.current()
        for stream in filter(None, (self._stream, self._training)):
            if stream != current:
                current.wait_stream(stream)

    def close(self, deadline: float) -> None:
        """Let what comes behind, as the end of process groups, wait for all that is queued."""
        self.follow()

    def current(self) -> torch.cuda.Stream:
        """The device's current stream; a number for the device spares the host some time."""
        return torch.cuda.current_stream(self._stream.device_index)

    def _carry_on(self) -> None:
        """Have each task run on to its next request, the newest first."""
        for queued in self._running[::-1]:
            if queued.runs:
                self._advance(queued)
        self._running = [queued for queued in self._running if queued.runs]

    def _advance(self, queued: QueuedTask) -> None:
        try:
            # torch marks what a reply holds as used on one more stream: lent memory would be freed late by that
            noted = queued.task.now is not time.perf_counter and not queued.task.lent
            queued.runs = queued.task.advance(self._transport, 0, NO_LIMIT, notes_arrival=noted)
        except Exception as error:
            failure = self._on_end(queued.task, error)
            for each in self._running:
                each.runs, each.error = False, failure
        else:
            if not queued.runs:
                self._on_end(queued.task, None)
                queued.end.record(self._stream)


class Awaited(torch.futures.Future[Tensor]):
    """The future of a queued task. A wait in Python, as of a hook around gradwire's, has its task come to its end first."""

    queued: weakref.ref[QueuedTask]

    def wait(self) -> Tensor:
        """The result, when it is there."""
        if (queued := self.queued()) is not None and queued.runs:
            queued.driver.finish(queued)
        return super().wait()


@dataclass(eq=False)
class QueuedTask:
    """A task whose kernels are queued, all of them when it no longer `runs`. `end`: behind the last."""

    task: Task
    driver: SideStream
    end: torch.cuda.Event
    runs: bool = True
    error: BaseException | None = None

    def wait(self, timeout: timedelta) -> Tensor:
        """Have the current stream wait for the result; its memory is not reused before that stream is done with it.

        Memory that was lent is its owner's to keep: FSDP2 frees weights in time by events of its own, and the allocator
        would hold them until it sees that this stream is done.
        """
        if self.runs:
            self.driver.finish(self)
        if self.error is not None:
            raise self.error
        result = self.task.result
        assert result is not None
        current = self.driver.current()
        self.end.wait(current)
        if self.task.lent:
            return result
        for part in (result._indices(), result._values()) if result.is_sparse else (result,):
            part.record_stream(current)
        return result


def _full_precision() -> AbstractContextManager[object]:
    """Keep a backward inside autocast from casting what programs compute."""
    return torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else nullcontext()
