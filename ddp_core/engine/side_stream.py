"""Programs on CUDA: a side stream, on which the whole program of a bucket is queued before the next one's."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..transport.collectives import start
from .task import Job

POLL_SECONDS = 0.01  # between two looks whether what is queued is done


class SideStream:
    """Runs a job's program at once, its kernels and collectives ordered by a stream of its own.

    With NCCL, waiting for a collective orders streams: neither the host nor the backward stream is held up, and the process
    group's own watchdog keeps the time limit. With Gloo the host waits.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, on_end: Callable[[Job, BaseException | None], None]
    ) -> None:
        self._group = group
        self._stream = torch.cuda.Stream(device, priority=-1)  # small kernels that a collective waits for go first
        self._on_end = on_end

    def ensure(self, rounds: int) -> None:
        """Nothing to prepare: one group serves all rounds, bucket after bucket."""

    def submit(self, job: Job, *, at_once: bool = False) -> None:
        """Queue the whole program behind the gradient's kernels and earlier buckets; `at_once` changes nothing here."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), torch.autocast("cuda", enabled=False):
            try:
                self._run(job)
            except Exception as error:
                self._on_end(job, error)
            else:
                self._on_end(job, None)

    def free_group(self) -> None:
        """There is no thread to wake up, and none to save."""

    def rest(self, deadline: float) -> bool:
        """Wait until all that is queued is done, or `deadline`, by time.monotonic; whether it is."""
        done = torch.cuda.Event()
        done.record(self._stream)
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def close(self, deadline: float) -> None:
        """Nothing runs between calls."""

    def abort(self) -> None:
        """The group is the caller's: its watchdog ends what hangs."""

    def _run(self, job: Job) -> None:
        job.begin()
        while job.request is not None:
            pending = start(job.request, self._group)
            job.sent(pending)
            pending.work.wait()
            job.resume()
