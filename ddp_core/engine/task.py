"""Tasks, which are programs on their way from request to request; what carries them, and what they return."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ...compress.protocol.requests import Program
from ..measure.step import Record
from ..transport.protocol import Pending, Reply, Transport


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
    takes the marks of its record, see `Step`. `nbytes`: of the gradients.
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
    _pending: Reply | None = None
    _since: float = 0.0

    def advance(self, transport: Transport, channel: int, timeout: timedelta, *, late: bool = False) -> bool:
        """Wait for the reply, if one is on its way, and run on to the next request, which goes to a channel.

        `late`: have it noted when the reply is there, since nobody waits for it meanwhile. Return True if there is a next
        request; if not, the result is there.
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
        record.requests.append((scope, request.tensor.nbytes, sent))
        self._since = now()
        self._pending = transport.start(request, channel)
        if late:
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
        channel = 1
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
