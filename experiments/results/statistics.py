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


def seconds_to(target: float, losses: Sequence[float], seconds: Sequence[float]) -> float | None:
    """When the smoothed losses, step by step, are first at most `target`; None where they never are.

    >>> seconds_to(1.0, [3.0, 1.0, 0.1, 0.1], [10.0, 20.0, 30.0, 40.0])
    40.0
    """
    reached = (time for time, loss in zip(seconds, smoothed(losses), strict=True) if loss <= target)
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
