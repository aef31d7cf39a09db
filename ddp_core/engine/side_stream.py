"""Tasks on CUDA: a side stream, on which the whole program of a bucket is queued before the next one's."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from ..transport.protocol import Transport
from .driver import FuturePending, OnEnd
from .task import Task

NO_LIMIT = timedelta()  # the group's own watchdog keeps it


class SideStream:
    """Runs a task at once, its kernels and collectives ordered by a stream of its own.

    With NCCL, waiting for a collective orders streams: neither the host nor the backward stream is held up. With Gloo the
    host waits.
    """

    def __init__(self, transport: Transport, device: torch.device, on_end: OnEnd) -> None:
        self._transport, self._device = transport, device
        self._stream = torch.cuda.Stream(device, priority=-1)  # small kernels that a collective waits for go first
        self._on_end = on_end
        transport.open(1)

    def submit(self, task: Task) -> FuturePending:
        """Queue the whole program behind the gradient's kernels and earlier buckets."""
        task.future = future = torch.futures.Future[Tensor](devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.autocast("cuda", enabled=False):
            try:
                while task.advance(self._transport, 0, NO_LIMIT):
                    pass
            except Exception as error:
                self._on_end(task, error)
            else:
                self._on_end(task, None)
        return FuturePending(future)

    def close(self, deadline: float) -> None:
        """Nothing runs between calls."""
