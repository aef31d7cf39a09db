"""Tasks on the CPU beside backward: one lane, a thread and a channel, for each round.

Backward must not wait, and the order of collectives on a channel must be the same on every rank. Both hold if lane j
starts round j of all tasks on a channel of its own, in the order in which they were submitted: a queue keeps that order
from lane to lane, whatever the completion times. While a lane computes, the next task's collective of the round before is
already in flight.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch import Tensor

from ..transport.protocol import Transport
from . import switch_interval
from .driver import FuturePending, OnEnd
from .task import Task

POLL_SECONDS = 0.1  # between two looks whether a thread still lives


class Lanes:
    """Threads that carry tasks from round to round. `on_end` is called on a lane's thread."""

    def __init__(self, transport: Transport, timeout: timedelta, on_end: OnEnd) -> None:
        self._process = os.getpid()
        self._transport, self._timeout, self._on_end = transport, timeout, on_end
        self._queues: list[SimpleQueue[Task | threading.Event | None]] = []
        self._threads: list[threading.Thread] = []

    def ensure(self, rounds: int) -> None:
        """Have a lane for each of `rounds` rounds, and one that ends tasks."""
        switch_interval.shorten(self)
        while len(self._queues) <= rounds:
            lane = len(self._queues)
            self._queues.append(SimpleQueue())
            thread = threading.Thread(target=self._serve, args=(lane,), name=f"gradwire-lane-{lane}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, task: Task) -> FuturePending:
        """Queue a task behind those submitted before."""
        task.future = future = torch.futures.Future[Tensor]()
        self._queues[0].put(task)
        return FuturePending(future)

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
        """End the threads once they have done what is queued; wait until `deadline` at most."""
        if os.getpid() != self._process:
            return  # a fork: the threads are its parent's
        switch_interval.restore(self)
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self, lane: int) -> None:
        """Lane j ends round j - 1 of each task, in order, and starts its round j."""
        torch.get_num_threads()  # makes torch's number of threads hold for BLAS here; it decides how products are rounded
        while (task := self._queues[lane].get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
                continue
            try:
                self._advance(task, lane)
            except BaseException as error:  # every error, whatever it is, must reach the waiting backward
                self._on_end(task, error)

    def _advance(self, task: Task, lane: int) -> None:
        if task.closed:
            task.close()
            return
        if task.begun:
            task.receive(self._timeout)
        else:
            task.begin()
        if task.request is None:
            self._on_end(task, None)
        else:
            task.send(self._transport, lane)
            self._queues[lane + 1].put(task)
