"""Tasks, which are programs on their way from request to request; what carries them on a CPU, and what they return.

Beside backward there is a lane, a thread and a channel, for each round. Backward must not wait, and the order of
collectives on a channel must be the same on every rank. Both hold if lane j starts round j of all tasks on a channel of
its own, in the order in which they were submitted: a queue keeps that order from lane to lane, whatever the completion
times. While a lane computes, the next task's collective of the round before is already in flight.

The first lane starts so many tasks ahead that a network is busy, and no more: each has payloads and work memory. That
changes no order, and no task waits for a later one.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ...compress.protocol.requests import Program
from ..measure.step import Record
from ..transport.protocol import Pending, Reply, Transport
from .in_flight import InFlight


class ProgramError(RuntimeError):
    """A program or its communication failed; the message begins with the label of its bucket."""


class HookError(ProgramError):
    """A ProgramError for torch's DDP, which puts "Unable to cast " before its text, and " to Tensor" behind."""

    def __str__(self) -> str:
        return (
            'the average of a bucket, because it failed (no type is wrong: torch\'s DDP puts "Unable to cast" before each '
            f'error of a hook, and "to Tensor" behind it). The error is:\n{super().__str__()}\n'
        )


@dataclass(eq=False)
class Task:
    """A program, what is in flight for it, and what it cost.

    `label`: what messages call it. `needs_future`: others than our reducer wait for it, by a future of torch's. `result`:
    what the program returned. `future`: of it, where whoever waits does not run the task. `closed`: it was given up. `now`:
    takes the marks of its record, see `Step`. `nbytes`: of the gradients. `lent`: the result is memory of whoever waits.
    `left_to_waiter`: it rests until the thread that submitted it comes back; no other one runs it.
    """

    program: Program[Tensor]
    label: str
    needs_future: bool = False
    result: Tensor | None = None
    future: torch.futures.Future[Tensor] | Future[Tensor] | None = None
    closed: bool = False
    record: Record = field(default_factory=Record)
    now: Callable[[], float] = time.perf_counter
    nbytes: int = 0
    lent: bool = False
    left_to_waiter: bool = False
    _pending: Reply | None = None
    _since: float = 0.0

    def advance(self, transport: Transport, channel: int, timeout: timedelta, *, notes_arrival: bool = False) -> bool:
        """Wait for the reply, if one is on its way, and run on to the next request, which goes to a channel.

        `notes_arrival`: have it noted when the reply is there, since nobody waits for it meanwhile. Return True if there is
        a next request; if not, the result is there.
        """
        if self.closed:
            raise RuntimeError("it was given up")
        reply, request, record, now = None, None, self.record, self.now
        if (pending := self._pending) is not None:
            reply = pending.wait(timeout)
            self._pending = None
        began = now()
        if pending is not None:
            record.spans.append(("wait", self._since, pending.arrived or began))
        try:
            request = self.program.send(reply)  # type: ignore[arg-type]  # None begins it
        except StopIteration as end:
            self.result = end.value
        if reply is None or self.result is not reply:  # else there was nothing to compute
            record.spans.append(("encode" if reply is None else "decode", began, now()))
        if request is None:
            return False
        ranks, scope = transport.ranks, request.scope
        sent = request.sent_bytes(ranks.world_size if scope == "all" else len(ranks.members(scope)))
        record.requests.append((scope, 0 if scope == "self" else request.tensor.nbytes, sent))
        self._since = now()
        self._pending = transport.start(request, channel)
        if notes_arrival:
            self._pending.expect_late_wait(now)
        return True

    def drop(self, deadline: float) -> None:
        """Let what is in flight arrive until `deadline`, by time.monotonic, then close."""
        if self._pending is not None:
            with suppress(Exception):  # nobody has asked for it
                self._pending.wait(timedelta(seconds=max(0.0, deadline - time.monotonic())))
        self.close()

    def close(self) -> None:
        """Drop the program and what it waits for, whose connection would stay open with it.

        A program that is running in another thread just now is dropped by that thread.
        """
        self.closed = True
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon()
        if inspect.getgeneratorstate(self.program) != inspect.GEN_RUNNING:
            self.program.close()


OnEnd: TypeAlias = Callable[[Task, BaseException | None], BaseException | None]  # told once of each task; what to raise


class Driver(Protocol):
    """Carries tasks from round to round, in the order in which they are submitted."""

    def submit(self, task: Task) -> Pending:
        """Take a task behind those before; returns at once."""

    def send_all(self) -> None:
        """Let no request of what was submitted depend on anybody's waiting, where any does."""
        return None

    def follow(self) -> None:
        """Have the current stream of a GPU wait for all that was submitted."""
        return None

    def close(self, deadline: float) -> None:
        """End what runs between calls, if anything does, once what is queued is done."""
        return None


@dataclass(frozen=True)
class ResultPending:
    """The result of a Python future. Ctrl-C ends a wait for it, which it does not for a future of torch's."""

    future: Future[Tensor]

    def wait(self, timeout: timedelta) -> Tensor:
        """Its value, when it is there. Whoever fills it keeps the time limit of each round, also of the tasks before."""
        return self.future.result()


@dataclass(frozen=True)
class FuturePending:
    """The result of a future. Whoever fills it keeps the time limit."""

    future: torch.futures.Future[Tensor]

    def wait(self, timeout: timedelta) -> Tensor:
        """Its value, when it is there."""
        return self.future.wait()


@dataclass(eq=False)
class WaitedTask:
    """A task that has begun, and that whoever waits for it runs. `runs`: it has not come to its end."""

    task: Task
    transport: Transport
    on_end: OnEnd
    runs: bool = False
    error: Exception | None = None

    def wait(self, timeout: timedelta) -> Tensor:
        """Run the task to its end; raises what `on_end` makes of an error."""
        channel, self.task.left_to_waiter = 1, False
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
