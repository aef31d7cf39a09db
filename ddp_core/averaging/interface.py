"""The interface of all that averages the buckets of the reducer."""

from __future__ import annotations

from typing import Protocol

from ..buckets.slices import Sendable
from ..measure.step import Step
from ..transport.protocol import Pending


class Averager(Protocol):
    """Averages the buckets of each step over ranks. All ranks make the same calls in the same order."""

    @property
    def scale(self) -> float:
        """The factor of gradients on their way into a bucket of the next step."""

    @property
    def zero_unused_gradients(self) -> bool:
        """True if stale gradients, of parameters unused on every rank, must be excluded: they would be carried over."""

    def begin_step(self, step: Step) -> None:
        """Begin a synchronized step, before its first bucket."""

    def average(self, bucket: Sendable) -> Pending:
        """Start to average a bucket, after those before it; waiting for what it returns gives the average."""

    def end_step(self) -> None:
        """End the step: all of its averages have been handed out."""
