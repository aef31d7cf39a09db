"""How exactly each bucket can be sent in the time that there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Graded:
    """A bucket that several methods can send, the most exact first.

    `ready`: seconds of computation until its gradients are there. `seconds`: that each method takes to send it. `worst`:
    the last method that is good enough.
    """

    ready: float
    seconds: tuple[float, ...]
    worst: int


def most_exact(buckets: Sequence[Graded], computation: float, budget: float) -> list[int]:
    """A method for each bucket, in the order sent: as exact as may be without a longer step.

    What communication adds to the `computation` of a step, in seconds, stays within `budget` times that; where no choice
    is that quick, within what the quickest of the same method for all adds. All buckets get a step more exact before any
    gets two, and the first ones, which have most time, come first.
    """

    def ends(methods: Sequence[int]) -> float:  # as `replay` without an order: it is asked a few times a bucket
        free = 0.0
        for each, method in zip(buckets, methods, strict=True):
            free = max(free, min(each.ready, computation)) + each.seconds[method]
        return max(computation, free)

    alike = ([min(method, each.worst) for each in buckets] for method in range(max(each.worst for each in buckets) + 1))
    chosen = min(alike, key=ends)
    limit = max(computation * (1 + budget), ends(chosen))
    for method in reversed(range(max(chosen))):
        for place, before in enumerate(chosen):
            if before > method:
                chosen[place] = method
                if ends(chosen) > limit:
                    chosen[place] = before
    return chosen
