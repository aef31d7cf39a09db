"""A task: a program on its way from request to request."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from ...compress.protocol.requests import Program
from ...compress.protocol.together import next_request
from ..measure.record import Record
from ..transport.protocol import Reply, Transport


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

    def advance(self, transport: Transport, channel: int, timeout: timedelta) -> bool:
        """Wait for the reply, if one is on its way, and run on to the next request, which goes to a channel.

        Whether there is a next one; if not, the result is there.
        """
        if self.closed:
            raise RuntimeError("it was given up")
        reply, record, now = None, self.record, self.now
        if (pending := self._pending) is not None:
            reply = pending.wait(timeout)
            self._pending = None
        began = now()
        if pending is not None:
            record.spans.append(("wait", self._since, pending.arrived_at() or began))
        request, self.result = next_request(self.program, reply)
        if reply is None or self.result is not reply:  # else there was nothing to compute
            record.spans.append(("encode" if reply is None else "decode", began, now()))
        if request is not None:
            ranks, scope = transport.ranks, request.scope
            sent = request.sent_bytes(ranks.world_size if scope == "all" else len(ranks.members(scope)))
            record.requests.append((scope, request.tensor.nbytes, sent))
            self._since = now()
            self._pending = transport.start(request, channel)
        return request is not None

    def expect_late_wait(self) -> None:
        """Have it noted when the reply is there, since nobody waits for it meanwhile."""
        if self._pending is not None:
            self._pending.expect_late_wait(self.now)

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
