"""The record of one synchronized step: what is noted while it runs, by whoever takes part in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...compress.state.gauge import Gauge
from .record import Record


@dataclass(frozen=True)
class BucketStats:
    """The cost of one bucket on this rank in the last synchronized step.

    Attributes:
        parameters: names of the bucket's parameters.
        elements: the number of gradient elements.
        record: traffic and seconds.
        feedback: measurements of error feedback; None for compressors without it.
        element_bytes: bytes of a gradient element, uncompressed.
        given: the time, by time.perf_counter, at which the averager received the bucket.
    """

    parameters: tuple[str, ...]
    elements: int
    record: Record
    feedback: Gauge | None = None
    element_bytes: int = 4
    given: float = field(default_factory=time.perf_counter)


@dataclass(eq=False)
class Step:
    """A synchronized step. It takes a mark a bucket, not a parameter, so it is always kept.

    `number`: from 1, steps before a checkpoint counted; 0 until its first bucket is sent. `forward`: when the last one
    before it began and ended. `programs`: what ran, in the order sent. `ready`, `launched`, `done`: by bucket, when its last
    gradient was there, when it was given to what averages it, and when its average was there, by time.perf_counter. `sent`:
    all buckets were, as far as a hook can tell. `finished`: their averages were handed out. `interval`: seconds from
    the first bucket of the step before to its own, 0 where there was none. `now`: takes the marks of what a planner wants to
    know of it (`clock.py`), which are time.perf_counter's as well.
    """

    number: int = 0
    forward: tuple[float, float] = (0.0, 0.0)
    programs: list[BucketStats] = field(default_factory=list)
    ready: dict[int, float] = field(default_factory=dict)
    launched: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    sent: bool = False
    finished: bool = False
    last_launch: float = 0.0
    computed: float = 0.0
    ended: float = 0.0
    interval: float = 0.0
    now: Callable[[], float] = time.perf_counter

    def under_way(self, *, idle: bool) -> bool:
        """Return True if some of its buckets have not come to their end. `idle`: all that were sent did."""
        return self.number > 0 and not self.finished and not (idle and self.sent)

    def watch(self, index: int, average: object) -> None:
        """Note when the average of somebody's hook is there, if it is a future; those of programs tell by their spans."""

        def end(_: object) -> None:
            self.done.setdefault(index, time.perf_counter())

        if isinstance(average, torch.futures.Future):
            average.add_done_callback(end)
