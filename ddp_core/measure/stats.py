"""What the compression of a model cost this rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add

from ..engine.task import Record

MANY = 1000  # records; adding them up at every step would take its time


@dataclass(frozen=True)
class BucketStats:
    """What one bucket cost this rank in the last synced step."""

    parameters: tuple[str, ...]
    elements: int
    record: Record


@dataclass(frozen=True)
class Stats:
    """`buckets`: the last synced step, in the order sent. `total`: all `steps` since the hook was attached."""

    steps: int
    buckets: tuple[BucketStats, ...]
    total: Record

    @property
    def last(self) -> Record:
        """The last synced step, all buckets together."""
        return _sum(self.buckets, Record())


class Records:
    """What buckets have cost so far. `step`: those of the last step, or of the one under way, in the order sent."""

    def __init__(self) -> None:
        self.step: list[BucketStats] = []
        self._steps = 0
        self._earlier: list[BucketStats] = []  # and not in the total yet
        self._total = Record()

    def begin_step(self) -> None:
        """The buckets of another step follow."""
        self.end_step()
        self._steps += 1

    def end_step(self) -> None:
        """What follows is not of the step so far."""
        self._earlier += self.step
        self.step = []
        if len(self._earlier) > MANY:
            self._add_up()

    def stats(self) -> Stats:
        """All that there is."""
        self._add_up()
        return Stats(self._steps, tuple(self.step), _sum(self.step, self._total))

    def _add_up(self) -> None:
        self._total, self._earlier = _sum(self._earlier, self._total), []


def _sum(buckets: Iterable[BucketStats], total: Record) -> Record:
    return reduce(add, (bucket.record for bucket in buckets), total)
