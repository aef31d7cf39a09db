"""Percentiles of times, losses as moving averages, the step at which a loss is reached, and intervals of means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

SMOOTHING = 0.9  # weight of the past in a loss that is shown
NEAR = 0.01  # a loss that much above a target, relative, has reached it: other seeds make no less of a difference
NEVER = "never"  # when a loss is reached that is not reached
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 95 %, by degrees of freedom from 1


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The 50th, 75th, 90th and 95th percentile, interpolated.

    >>> percentiles([1.0, 2.0, 3.0])["p50"]
    2.0
    """
    values = torch.tensor(seconds, dtype=torch.float64)
    return {f"p{each}": torch.quantile(values, each / 100).item() for each in (50, 75, 90, 95)}


def steps_to(target: float, losses: Sequence[float]) -> int | None:
    """Return after how many steps the smoothed losses are first at most `target`; None if they never are.

    >>> steps_to(1.0, [3.0, 1.0, 0.1, 0.1])
    4
    """
    reached = (step for step, loss in enumerate(smoothed(losses), 1) if loss <= target)
    return next(reached, None)


def steps_with_loss_of(losses: Sequence[float], ended: Sequence[float]) -> int:
    """Return after how many steps smoothed `losses` stay at the one that another training ended with; all, if never.

    >>> steps_with_loss_of([4.0, 3.0, 2.0, 1.0], ended=[4.0, 3.5, 3.1])
    2
    """
    target, curve = smoothed(ended)[-1], smoothed(losses)
    above = [step for step, loss in enumerate(curve, start=1) if loss > target]
    return min(len(curve), above[-1] + 1) if above else 1


def smoothed(values: Sequence[float]) -> list[float]:
    """An exponential moving average without its bias to the start.

    >>> smoothed([2.0, 2.0])
    [2.0, 2.0]
    """
    total, weight, averages = 0.0, 0.0, []
    for value in values:
        total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1
        averages.append(total / weight)
    return averages


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of a few values, by Student's t; infinite for a single value.

    >>> round(interval([1.0, 2.0, 3.0]), 2)
    2.48
    """
    freedom = len(values) - 1
    if freedom < 1:
        return math.inf
    quantile = STUDENT[min(freedom, len(STUDENT)) - 1]  # a little too wide for more values than the table has
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def per_cent(mean: float, half_width: float | None) -> str:
    """A difference in per cent with its interval; no difference where the interval has zero in it.

    >>> per_cent(2.81, 0.5), per_cent(0.3, 1.0), per_cent(-0.52, None)
    ('+2.8 ± 0.5 %', 'no difference seen (+0.3 ± 1.0 %)', '-0.5 %')
    >>> per_cent(-0.065, 0.0499)
    '-0.07 ± 0.05 %'
    """
    if half_width is None:
        return f"{mean:+.1f} %"
    digits = 1 if half_width >= 0.05 else 2
    shown = f"{mean:+.{digits}f} ± {half_width:.{digits}f} %"
    return f"no difference seen ({shown})" if abs(mean) <= half_width else shown
