"""Percentiles of times, and losses as moving averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SMOOTHING = 0.9  # weight of the past in a loss that is shown


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
