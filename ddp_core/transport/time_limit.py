"""The time limit of waits for other ranks, as users give it."""

from __future__ import annotations

from datetime import timedelta


def time_limit(timeout: timedelta) -> timedelta:
    """`timeout`. Raises TypeError for a number, whose unit is not told, and ValueError where there would be no time."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is a datetime.timedelta, such as timedelta(seconds=60); got {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout is above 0, such as timedelta(seconds=60); got {timeout!r}")
    return timeout
