"""Measuring several implementations of the same work turn by turn, so that what disturbs one disturbs all."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from ...kernels import use_backend
from .clocks import ColdClock

FEWEST = 3  # repeats, whatever they take


@dataclass(frozen=True)
class Racer:
    """`work` is timed, on the named kernel backends; `prepare` comes before each repeat and is not. `cold`: never run."""

    work: Callable[[], object]
    backends: tuple[str, ...]
    prepare: Callable[[], object] = bool
    cold: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of the repeats and their quartiles."""

    median: float
    quartiles: tuple[float, float]
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """The summary of at least two repeats."""
        first, _, third = quantiles(seconds, n=4, method="inclusive")
        return cls(median(seconds), (first, third), len(seconds))


def race(racers: Mapping[str, Racer], clock: ColdClock, repeats: int, seconds: float) -> dict[str, Timing]:
    """Time all racers, one repeat of each a round.

    At most `repeats` rounds. Who has taken more than `seconds`, preparation included, is left out of those after the
    third, so that the slow do not keep the fast from being repeated. The first repeat of a cold racer does not count,
    unless it takes longer than that.
    """
    found: dict[str, list[float]] = {name: [] for name in racers}
    taken = dict.fromkeys(racers, 0.0)
    for name, racer in racers.items():
        if racer.cold and (first := _repeat(racer, clock)) > seconds:
            found[name].append(first)
    for done in range(max(repeats, FEWEST)):
        racing = deque(name for name in racers if len(found[name]) < FEWEST or taken[name] < seconds)
        racing.rotate(done)  # each is behind another each time
        for name in racing:
            start = time.monotonic()
            found[name].append(_repeat(racers[name], clock))
            taken[name] += time.monotonic() - start
    return {name: Timing.of(each) for name, each in found.items()}


def _repeat(racer: Racer, clock: ColdClock) -> float:
    racer.prepare()
    with use_backend(*racer.backends):
        return clock.seconds(racer.work)
