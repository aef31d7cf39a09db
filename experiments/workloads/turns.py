"""Trainings that take turns, so that a host that changes speed slows all of them alike.

Each training is a generator that pauses after every few steps. All trainings of a network live in the same ranks, and each
one computes exactly what it would compute alone.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import count
from random import Random
from typing import TypeAlias

from ..results.comparison import RunResult

Training: TypeAlias = Generator[None, None, RunResult]  # pauses after each turn


def in_turns(trainings: Sequence[Training]) -> list[RunResult]:
    """Run all trainings to their ends, one turn of each at a time; return their results in the order given.

    Every round has another order, which is the same on all ranks.
    """
    finished: dict[int, RunResult] = {}
    for number in count():
        unfinished = [place for place in range(len(trainings)) if place not in finished]
        if not unfinished:
            break
        for place in Random(number).sample(unfinished, len(unfinished)):
            try:
                next(trainings[place])
            except StopIteration as end:
                finished[place] = end.value
    return [finished[place] for place in range(len(trainings))]
