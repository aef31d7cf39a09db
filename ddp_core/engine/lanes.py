"""Tasks on the CPU beside backward: one lane, a thread and a channel, for each round.

Backward must not wait, and the order of collectives on a channel must be the same on every rank. Both hold if lane j
starts round j of all tasks on a channel of its own, in the order in which they were submitted: a queue keeps that order
from lane to lane, whatever the completion times. While a lane computes, the next task's collective of the round before is
already in flight.

The first lane starts so many tasks ahead that a network is busy, and no more: each has payloads and work memory. That
changes no order, and no task waits for a later one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import accumulate
from queue import SimpleQueue

import torch

from ..transport.protocol import Pending, Transport
from .task import Driver, FuturePending, OnEnd, ResultPending, Task

FEWEST, MOST_BYTES = 3, 64 << 20  # tasks that may be on their way whatever their size; bytes of gradients of more


def in_flight(nbytes: Sequence[int]) -> int:
    """Return how many of these tasks, in the order submitted, may be on their way at once; `nbytes`: of their gradients."""
    together = list(accumulate(nbytes))
    return max(min(FEWEST, len(together)), sum(total <= MOST_BYTES for total in together))


class InFlight:
    """The tasks that have begun and not ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks = self._bytes = 0

    def enter(self, nbytes: int, limit: float) -> None:
        """Wait until a task with so many bytes may begin. Raises RuntimeError where no task ends within `limit` seconds.

        The task counts in either case, until it leaves.
        """
        with self._changed:
            moves = True
            while moves and self._tasks >= FEWEST and self._bytes + nbytes > MOST_BYTES:
                moves = self._changed.wait(limit)
            self._tasks, self._bytes = self._tasks + 1, self._bytes + nbytes
        if not moves:
            raise RuntimeError(f"none of {self._tasks - 1} buckets that are on their way arrived within {limit:.0f} s")

    def leave(self, nbytes: int) -> None:
        """Note that a task has ended, however."""
        with self._changed:
            self._tasks, self._bytes = self._tasks - 1, self._bytes - nbytes
            self._changed.notify()


class Lanes(Driver):
    """Threads that carry tasks from round to round, and wait for each other alone. `on_end` is called on a lane's thread."""

    def __init__(self, transport: Transport, timeout: timedelta, on_end: OnEnd) -> None:
        self._transport, self._timeout, self._on_end = transport, timeout, on_end
        self._in_flight = InFlight()
        self._lanes: list[tuple[SimpleQueue[Task | None], threading.Thread]] = []

    def submit(self, task: Task) -> Pending:
        """Queue a task behind those submitted before."""
        pending = FuturePending(torch.futures.Future()) if task.needs_future else ResultPending(Future())
        task.future = pending.future
        if task.closed:  # while it had no future that could tell
            raise RuntimeError(f"{task.label} was given up, since another one has failed")
        if not self._lanes:
            self._add_lane()
        self._lanes[0][0].put(task)
        return pending

    def _add_lane(self) -> None:
        """Make the next lane, on the only thread that feeds it."""
        queue: SimpleQueue[Task | None] = SimpleQueue()
        number = len(self._lanes)
        serving = queue, partial(self._advance, lane=number)
        thread = threading.Thread(target=_serve, args=serving, name=f"gradwire-lane-{number}", daemon=True)
        thread.start()
        self._lanes.append((queue, thread))

    def close(self, deadline: float) -> None:
        """End the threads once they have done what is queued; wait until `deadline` at most."""
        for queue, thread in self._lanes:
            queue.put(None)
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _advance(self, task: Task, lane: int) -> None:
        """Lane j ends round j - 1 of a task, and starts its round j."""
        try:
            if lane == 0:  # the task that began first waits for one reply in each lane
                self._in_flight.enter(task.nbytes, (1 + len(self._lanes)) * self._timeout.total_seconds())
            if task.closed:
                task.close()
            elif task.advance(self._transport, lane, self._timeout):
                if lane + 1 == len(self._lanes):
                    self._add_lane()
                self._lanes[lane + 1][0].put(task)
                return
            else:
                self._on_end(task, None)
        except BaseException as error:  # every error, whatever it is, must reach the waiting backward
            self._on_end(task, error)
        self._in_flight.leave(task.nbytes)


def _serve(queue: SimpleQueue[Task | None], advance: Callable[[Task], None]) -> None:
    torch.get_num_threads()  # makes torch's number of threads hold for BLAS here; it decides how products are rounded
    while (task := queue.get()) is not None:
        advance(task)
        del task  # or its tensors would live until the next one comes
