"""The record of one synchronized step: what is noted while it runs, by whoever takes part in it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from .record import Record


@dataclass(frozen=True)
class BucketStats:
    """What one bucket cost this rank in the last synced step."""

    parameters: tuple[str, ...]
    elements: int
    record: Record


@dataclass
class Marks:
    """What is noted of a bucket, by time.perf_counter."""

    ready: float
    launched: float = math.inf
    done: float = math.inf

    def end(self, _: object) -> None:
        """The average is there, its future says."""
        self.done = min(self.done, time.perf_counter())


@dataclass(eq=False)
class Step:
    """A synchronized step. It takes a mark a bucket, not a parameter, so it is always kept.

    `number`: from 1, steps before a checkpoint counted; 0 until its first bucket is sent. `forward`: when the last one
    before it began and ended. `programs`: what ran, in the order sent. `sent`: all buckets were, as far as a hook can tell.
    `finished`: their averages were handed out.
    """

    number: int = 0
    forward: tuple[float, float] = (0.0, 0.0)
    programs: list[BucketStats] = field(default_factory=list)
    marks: dict[int, Marks] = field(default_factory=dict)
    sent: bool = False
    finished: bool = False
    last_gradient: float = 0.0
    last_launch: float = 0.0
    computed: float = 0.0
    ended: float = 0.0

    def torn(self, *, failed: bool) -> bool:
        """Whether some of its buckets never came to their end. `failed`: whether one that was sent did not."""
        return self.number > 0 and not self.finished and (failed or not self.sent)

    def bucket_ready(self, index: int) -> None:
        """A bucket has got its last gradient."""
        self.last_gradient = time.perf_counter()
        self.marks[index] = Marks(self.last_gradient)

    def bucket_launched(self, index: int) -> None:
        """A bucket is about to be averaged."""
        if index in self.marks:  # not where this rank has no inputs, and stands in with zeros
            self.marks[index].launched = time.perf_counter()

    def watch(self, index: int, average: object) -> None:
        """Note when the average of somebody's hook is there; those of programs tell by their spans.

        A hook may return any object that can be waited for.
        """
        if index in self.marks and isinstance(average, torch.futures.Future):
            average.add_done_callback(self.marks[index].end)

    def bucket_done(self, index: int) -> None:
        """Backward has waited for a bucket's average."""
        if (mark := self.marks.get(index)) is not None:
            mark.end(None)

    def all_launched(self) -> None:
        """The last bucket is on its way."""
        self.last_launch = time.perf_counter()

    def computation_ends(self) -> None:
        """Backward has nothing left to compute."""
        self.computed = time.perf_counter()

    def end(self) -> None:
        """All averages were handed out."""
        self.finished = True
        self.ended = time.perf_counter()
