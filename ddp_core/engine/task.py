"""A bucket's program on its way through the engine."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...compress.protocol import Program, Request
from ...compress.simulate import Traffic, traffic
from ...compress.together import Running
from ..transport.collectives import Pending


class ProgramError(RuntimeError):
    """A program or its communication failed; the message begins with the label of its bucket."""


@dataclass
class Record:
    """What one run of a bucket's program cost this rank: traffic, and host seconds by what they went to.

    `encode`: until the first request. `wait`: from giving a request to a process group until its result is taken.
    `decode`: all arithmetic after the first result. `spans`: (which of them, begin, end) of one run, by time.perf_counter.
    """

    traffic: Traffic = field(default_factory=Traffic)
    encode: float = 0.0
    wait: float = 0.0
    decode: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def __add__(self, other: Record) -> Record:
        return Record(
            self.traffic + other.traffic,
            self.encode + other.encode,
            self.wait + other.wait,
            self.decode + other.decode,
        )


@dataclass(eq=False)
class Job:
    """A program, what it waits for, and the future of its result."""

    label: str
    program: Program[Tensor]
    world_size: int
    future: torch.futures.Future[Tensor]
    record: Record = field(default_factory=Record)
    pending: Pending | None = None
    closed: bool = False
    running: Running | None = None
    _since: float = field(default_factory=time.perf_counter)

    @property
    def request(self) -> Request | None:
        """What the program asks for now; None before it began and after its end."""
        return self.running.request if self.running else None

    @property
    def result(self) -> Tensor | None:
        """What the program returned."""
        return self.running.result if self.running else None

    def begin(self) -> None:
        """Run to the first request."""
        self._since = time.perf_counter()
        self.running = Running(self.program)
        self.record.encode += self._lap("encode")

    def sent(self, pending: Pending) -> None:
        """Note that the request is in flight."""
        assert self.request is not None
        self.record.traffic += traffic(self.request, self.world_size)
        self.pending = pending
        self._since = time.perf_counter()

    def resume(self) -> None:
        """Run on with the reply that has arrived, to the next request or the end."""
        assert self.running is not None
        assert self.pending is not None
        self.record.wait += self._lap("wait")
        reply, self.pending = self.pending.reply, None
        self.running.advance(reply)
        self.record.decode += self._lap("decode")

    def close(self) -> None:
        """Drop the program and what it waits for, whose connection would stay open with it.

        A program that is running in another thread just now is dropped by that thread.
        """
        self.closed = True
        self.pending = None
        if inspect.getgeneratorstate(self.program) != inspect.GEN_RUNNING:
            self.program.close()

    def _lap(self, spent_on: str) -> float:
        begin, self._since = self._since, time.perf_counter()
        self.record.spans.append((spent_on, begin, self._since))
        return self._since - begin
