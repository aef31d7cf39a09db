"""What averages buckets, as the reducer knows it."""

from __future__ import annotations

from typing import Protocol

from ..buckets.slices import Sendable
from ..measure.step import Step
from ..transport.protocol import Pending


class Averager(Protocol):
    """Averages the buckets of a model over ranks, step after step."""

    @property
    def scale(self) -> float:
        """What the gradients of the next step are to be multiplied by on their way into a bucket."""

    @property
    def fresh(self) -> bool:
        """Whether old ones, of parameters that no rank used, must not be among them, since they would be remembered."""

    def begin_step(self, step: Step) -> None:
        """The first bucket of a synchronized step comes next: give it its number."""

    def start(self, bucket: Sendable) -> Pending:
        """Begin to average a bucket over ranks, after those before; its average is what waiting for it gives."""

    def end_step(self) -> None:
        """All averages of the step have been handed out."""
