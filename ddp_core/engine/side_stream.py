"""Tasks on CUDA: a side stream, on which the whole program of a bucket is queued before the next one's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from ..transport.protocol import Pending, Transport
from .driver import FuturePending, OnEnd
from .task import Task

NO_LIMIT = timedelta()  # the group's own watchdog keeps it


class SideStream:
    """Runs a task at once, its kernels and collectives ordered by a stream of its own.

    With NCCL, waiting for a collective orders streams: neither the host nor the backward stream is held up. With Gloo the
    host waits.
    """

    def __init__(self, transport: Transport, device: torch.device, on_end: OnEnd) -> None:
        self._transport, self._device, self._on_end = transport, device, on_end
        self._stream = torch.cuda.Stream(device, priority=-1)  # small kernels that a collective waits for go first
        self._gradients = torch.cuda.Event()  # recorded again for each task: who waits, waits for what was there then
        transport.open(1)

    def submit(self, task: Task) -> Pending:
        """Queue the whole program behind the gradient's kernels and earlier buckets."""
        if task.needs_future:  # making and filling one is dear
            task.future = torch.futures.Future[Tensor](devices=[self._device])
        queued = QueuedTask(task, self._stream.device_index, torch.cuda.Event())
        current = torch.cuda.current_stream(self._stream.device_index)
        self._gradients.record(current)
        self._gradients.wait(self._stream)
        with _on(self._stream, instead_of=current), _full_precision():
            try:
                while task.advance(self._transport, 0, NO_LIMIT):
                    pass
            except Exception as error:
                queued.error = self._on_end(task, error)
            else:
                self._on_end(task, None)
                queued.end.record(self._stream)
        return queued if task.future is None else FuturePending(task.future)

    def close(self, deadline: float) -> None:
        """Nothing runs between calls."""


@dataclass(eq=False)
class QueuedTask:
    """A task whose kernels are queued. `end`: behind the last of them."""

    task: Task
    device_index: int
    end: torch.cuda.Event
    error: BaseException | None = None

    def wait(self, timeout: timedelta) -> Tensor:
        """Have the current stream wait for the result; its memory is not reused before that stream is done with it."""
        if self.error is not None:
            raise self.error
        result = self.task.result
        assert result is not None
        current = torch.cuda.current_stream(self.device_index)
        self.end.wait(current)
        for part in (result._indices(), result._values()) if result.is_sparse else (result,):
            part.record_stream(current)
        return result


@contextmanager
def _on(stream: torch.cuda.Stream, instead_of: torch.cuda.Stream) -> Iterator[None]:
    """As torch.cuda.stream, which is dear, for a thread whose current stream on the device is known."""
    if torch.cuda.current_device() != stream.device_index:
        with torch.cuda.stream(stream):
            yield
        return
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(instead_of)


def _full_precision() -> AbstractContextManager[object]:
    """Keep a backward inside autocast from casting what programs compute."""
    return torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else nullcontext()
