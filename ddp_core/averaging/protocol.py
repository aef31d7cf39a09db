"""What averages buckets, as the reducer knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..buckets.slices import Sendable
from ..measure.step import Step
from ..transport.protocol import Pending


@dataclass(frozen=True)
class Wishes:
    """What those who average want of a step's gradients.

    `scale`: what these are multiplied by on their way into a bucket. `fresh`: whether old ones, of parameters that no rank
    used, must not be among them, since they would be remembered.
    """

    scale: float = 1.0
    fresh: bool = False


class Averager(Protocol):
    """Averages the buckets of a model over ranks, step after step."""

    @property
    def wishes(self) -> Wishes:
        """For the gradients of the next step."""

    def begin_step(self, step: Step) -> None:
        """The first bucket of a synchronized step comes next: give it its number."""

    def start(self, bucket: Sendable) -> Pending:
        """Begin to average a bucket over ranks, after those before; its average is what waiting for it gives."""

    def end_step(self) -> None:
        """All averages of the step have been handed out."""
