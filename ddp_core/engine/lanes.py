"""Programs on the CPU: one lane, a thread and a process group, for each round.

Backward must not wait, and the order of collectives on a group must be the same on every rank. Both hold if lane j
starts round j of all buckets on a group of its own, in the order in which the buckets were submitted: a queue keeps
that order from lane to lane, whatever the completion times. While a lane computes, the next bucket's collective of the
round before is already in flight.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from ..transport.collectives import start
from ..transport.private_group import private_group
from . import switch_interval as handover
from .task import Job

POLL_SECONDS = 0.1  # between two looks whether a thread still lives


class Lanes:
    """Threads that carry jobs from round to round.

    `on_end(job, error)` is called once for each job, on a lane's thread: with None when its result is there.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout: timedelta, on_end: Callable[[Job, BaseException | None], None]
    ) -> None:
        self._process = os.getpid()
        self._group = group
        self._timeout = timeout
        self._on_end = on_end
        self._groups: list[dist.ProcessGroup] = []
        self._queues: list[SimpleQueue[Job | threading.Event | None]] = []
        self._threads: list[threading.Thread] = []
        self._queued = self._begun = 0  # jobs that were to begin on the first lane's thread, and those that did
        handover.hasten(self)
        self._add_queue()

    def ensure(self, rounds: int) -> None:
        """Have a lane for each of `rounds` rounds. A collective call: every rank makes it at the same bucket."""
        while len(self._groups) < rounds:
            lane = len(self._groups)
            self._groups.append(self._new_group(lane))
            self._add_queue()

    def _new_group(self, lane: int) -> dist.ProcessGroup:
        try:
            return private_group(self._group, self._timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"ranks {dist.get_process_group_ranks(self._group)} did not all make a process group for lane {lane} "
                f"within {self._timeout}; see what the others raised. {error}"
            ) from error

    def submit(self, job: Job, *, at_once: bool = False) -> None:
        """Queue a job behind those submitted before.

        `at_once`: it has nothing to compute before its first request, which leaves from here, if those before have left.
        """
        if at_once and self.free_group():
            self._step(job, 0)
        else:
            self._queued += 1
            self._queues[0].put(job)

    def free_group(self) -> dist.ProcessGroup | None:
        """The first lane's group, if a collective may be started on it from here: those before have left."""
        return self._groups[0] if self._groups and self._queued == self._begun else None

    def rest(self, deadline: float) -> bool:
        """Wait until all that is queued is done, or `deadline`, by time.monotonic; whether it is."""
        for queue, thread in zip(self._queues, self._threads, strict=True):
            done = threading.Event()
            queue.put(done)
            while thread.is_alive() and not done.wait(max(0.0, min(deadline - time.monotonic(), POLL_SECONDS))):
                if time.monotonic() > deadline:
                    return False
        return True

    def close(self, deadline: float) -> None:
        """End the threads once they have done what is queued, then the groups; wait until `deadline` at most."""
        if os.getpid() != self._process:
            return  # a fork: the threads are its parent's
        handover.relax(self)
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._drop_groups()

    def abort(self) -> None:
        """Break the connections, so that no rank waits for this one."""
        self._drop_groups()

    def _drop_groups(self) -> None:
        """Gloo's own abort does nothing: connections close when the last reference is gone."""
        self._groups = []

    def _add_queue(self) -> None:
        stage = len(self._queues)
        self._queues.append(SimpleQueue())
        thread = threading.Thread(target=self._serve, args=(stage,), name=f"gradwire-lane-{stage}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, stage: int) -> None:
        """Stage j ends round j - 1 of each job, in order, and starts its round j."""
        torch.get_num_threads()  # makes torch's number of threads hold for BLAS here; it decides how products are rounded
        while (job := self._queues[stage].get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            self._step(job, stage)
            if stage == 0:
                self._begun += 1

    def _step(self, job: Job, stage: int) -> None:
        try:
            self._advance(job, stage)
        except BaseException as error:  # every error, whatever it is, must reach the waiting backward
            self._on_end(job, error)

    def _advance(self, job: Job, stage: int) -> None:
        if job.closed:
            job.close()
            return
        if job.pending is None:
            job.begin()
        else:
            job.pending.work.wait(self._timeout)
            job.resume()
        if job.request is None:
            self._on_end(job, None)
        elif stage < len(self._groups):
            job.sent(start(job.request, self._groups[stage]))
            self._queues[stage + 1].put(job)
        else:
            raise RuntimeError(
                f"the program asks for round {stage + 1}, but its dry run had only {stage}: "
                f"the number of rounds must not depend on the gradient's values"
            )
