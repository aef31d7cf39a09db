"""The time that each compressor trains until it reaches the loss of 16 bits, and its spread over repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, quantiles

from .comparison import Results, RunResult
from .statistics import NEAR, smoothed, steps_to, steps_with_loss_of

UNCOMPRESSED = ("bf16", "fp16", "none", "torch")  # what a user gets without giving anything up, the usual ones first
REPEATS = 5  # of a run that has enough turns
FEWEST_REPEATS = 3  # that a verdict takes


@dataclass(frozen=True)
class TimeToLoss:
    """Seconds of training to a loss, once per repeat."""

    repeats: tuple[float, ...]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The first quartile, the median and the third quartile, interpolated."""
        if len(self.repeats) == 1:
            return (*self.repeats, *self.repeats, *self.repeats)
        low, median, high = quantiles(self.repeats, n=4, method="inclusive")
        return low, median, high

    @property
    def seconds(self) -> float:
        """The median."""
        return self.quartiles[1]

    def differs_from(self, other: TimeToLoss) -> bool:
        """Return True if the ranges between the quartiles do not overlap."""
        (low, _, high), (others_low, _, others_high) = self.quartiles, other.quartiles
        return high < others_low or others_high < low


def reference(results: Results) -> RunResult | None:
    """Return the run whose last loss all others are to reach: bf16, or the next uncompressed one; None without any."""
    by_name = {run.compressor: run for run in results.runs if run.loss}
    return next((by_name[name] for name in UNCOMPRESSED if name in by_name), None)


def times_to_loss(results: Results) -> list[TimeToLoss | None]:
    """Return for each run the time until its smoothed loss is that of the reference at its end; None if it never is.

    A loss of `NEAR` above it is near enough.
    """
    wanted = reference(results)
    if wanted is None:
        return [None for _ in results.runs]
    target = smoothed(wanted.loss)[-1] * (1 + NEAR)
    steps = [steps_to(target, run.loss) for run in results.runs]
    return [None if each is None else time_of(run, each) for run, each in zip(results.runs, steps, strict=True)]


def steps_behind(results: Results) -> str:
    """Return by how many steps each compressor is behind the reference at its end, as a sentence; nothing without one.

    A compressor has as many steps more than those after which the reference has its last smoothed loss.
    """
    wanted = reference(results)
    lossy = [run for run in results.runs if run.compressor not in UNCOMPRESSED]
    finite = [run for run in lossy if run.loss and all(map(math.isfinite, run.loss))]
    if wanted is None or not finite or not all(map(math.isfinite, wanted.loss)):
        return ""
    late = (f"{len(run.loss) - steps_with_loss_of(wanted.loss, run.loss):,} with {run.compressor}" for run in finite)
    return f"Steps behind {wanted.compressor} after {len(wanted.loss):,} steps (training loss): {', '.join(late)}."


def time_of(run: RunResult, steps: int) -> TimeToLoss:
    """Return how long a run takes for its first `steps` steps, in up to `REPEATS` repeats.

    A repeat counts every `REPEATS`-th turn for all of them, so each repeat samples the whole way. The first turn builds
    buckets and groups and is left out. A run without turns has one repeat: the time that it took.
    """
    turns = seconds_per_step(run)
    if run.turn_steps is None or not turns:
        return TimeToLoss((run.train_seconds[steps - 1],))
    sampled = turns[: max(REPEATS, steps // run.turn_steps)]
    return TimeToLoss(tuple(steps * mean(sampled[first::REPEATS]) for first in range(min(REPEATS, len(sampled)))))


def seconds_per_step(run: RunResult) -> Sequence[float]:
    """Return the mean seconds per step of each whole turn but the first."""
    if run.turn_steps is None:
        return []
    ends = run.train_seconds[run.turn_steps - 1 :: run.turn_steps]
    return [(end - begin) / run.turn_steps for begin, end in pairwise(ends)]


def digits(seconds: float) -> str:
    """Return seconds as text: three digits where they are few.

    >>> digits(0.419), digits(11.93), digits(120.7)
    ('0.42', '11.9', '120.7')
    """
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"


def meaning(results: Results) -> str:
    """Return what the times to the loss are, in a sentence; nothing where there are none."""
    wanted = reference(results)
    if wanted is None:
        return ""
    told = f"Time to loss: seconds of training until the smoothed loss is within {NEAR:.0%} of the last loss of "
    repeats = max((len(time.repeats) for time in times_to_loss(results) if time), default=1)
    return f"{told}{wanted.compressor}" + (f" (median and quartiles of {repeats} repeats)." if repeats > 1 else ".")
