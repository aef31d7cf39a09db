"""What the compression of a model cost this rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add

from .job import Record


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
        return reduce(add, (bucket.record for bucket in self.buckets), Record())
