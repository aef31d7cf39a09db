"""The cost of a model's compression on this rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .record import Record, summed
from .step import BucketStats, Step

MANY, LATEST = 100, 50  # records that are added up together, and those that are left, which may be under way
RECENT = 8  # steps that are kept as they are


@dataclass(frozen=True)
class Stats:
    """The cost of a model's compression on this rank.

    Attributes:
        steps: the number of synchronized steps, those before a checkpoint included.
        buckets: the buckets of the last synchronized step, in the order sent.
        total: traffic and seconds of all steps since `attach`.
    """

    steps: int
    buckets: tuple[BucketStats, ...]
    total: Record

    @property
    def last(self) -> Record:
        """Traffic and seconds of the last synchronized step, all buckets together."""
        return total(self.buckets)


class Totals:
    """The cost of the steps so far.

    `recent`: the last of them. `watchers`: each `hooks.watching.Watch` of the model. When a step begins, its `step_ended`
    is called with the number of steps so far, those before a checkpoint counted.
    """

    def __init__(self) -> None:
        self._earlier: list[BucketStats] = []  # and not in the total yet
        self._total = Record()
        self._began = 0.0
        self.recent: deque[Step] = deque(maxlen=RECENT)
        self.watchers: list[Any] = []

    def begin(self, step: Step, ended: int) -> None:
        """A step begins, after `ended` others."""
        now = time.perf_counter()
        step.interval, self._began = now - self._began if self._began else 0.0, now
        for watcher in tuple(self.watchers):
            watcher.step_ended(ended)

    def count(self, programs: Iterable[BucketStats], step: Step | None = None) -> None:
        """Count programs, which belong to a step or to none; their cost may still be noted."""
        if step is not None and programs:
            self.recent.append(step)
        if len(self._earlier) > MANY:  # not at every step; nor all records of a training when somebody asks
            self._total, self._earlier = total(self._earlier[:-LATEST], self._total), self._earlier[-LATEST:]
        self._earlier += programs

    def stats(self, step: Step, number: int) -> Stats:
        """Return all statistics. `step`: the last one, which has not been counted; `number`: of steps so far."""
        programs = tuple(step.programs)
        whole = total((*self._earlier, *programs), self._total)
        return Stats(number, programs, whole)

    def close(self) -> None:
        """There will be no more steps."""
        for watcher in tuple(self.watchers):
            watcher.close()

    def recent_and(self, step: Step | None) -> tuple[Step, ...]:
        """The last steps, and one that has not been counted, if it has sent anything."""
        return (*self.recent, step) if step is not None and step.programs else tuple(self.recent)


def total(buckets: Iterable[BucketStats], *before: Record) -> Record:
    """The sum of what buckets cost, and of what was counted before."""
    return summed([*before, *(bucket.record for bucket in buckets)])
