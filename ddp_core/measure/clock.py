"""The time of events: by the host's clock, or by that of a device, which does what was queued when it gets there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

MILLISECOND = 1e-3


class Clock:
    """The host's clock, whose marks tell all at once; and what any other one has.

    A mark is a number: what time.perf_counter says when it is taken, whatever else it knows. So whoever tells of the host
    reads any mark; only `seconds` tells when it was reached. `at_once`: these are the same.
    """

    at_once = True
    now: Callable[[], float] = staticmethod(time.perf_counter)  # nothing waits, on any thread

    def took(self, mark: float) -> bool:
        """Return True if it took a mark, or could have."""
        return True

    def reached(self, mark: float) -> bool:
        """Return True if what was queued before a mark is done. Waits for nothing."""
        return True

    def seconds(self, since: float, until: float) -> float:
        """From one of its marks to another, waiting until both are reached; below 0 where they were in the other order."""
        return until - since

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given; the host always has."""


class CudaMark(float):
    """The time at which the host queued an event, and the event."""

    __slots__ = ("event",)
    event: torch.cuda.Event

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy knows the host's time alone, as of what another process is told."""
        return float, (float(self),)


class CudaClock(Clock):
    """The clock of a GPU: a mark is reached when the stream that was current has come to it."""

    at_once = False

    def __init__(self, device: torch.device) -> None:
        self._index = device.index  # another device may be the current one

    def now(self) -> float:
        """A mark behind all that the current stream of the device has to do so far; one of the host in a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            return time.perf_counter()  # an event of a graph never tells when it was
        mark = CudaMark(time.perf_counter())
        mark.event = torch.cuda.Event(enable_timing=True)
        mark.event.record(torch.cuda.current_stream(self._index))
        return mark

    def took(self, mark: float) -> bool:
        """Return True if it has an event, which it has been recorded with."""
        return isinstance(mark, CudaMark)

    def reached(self, mark: float) -> bool:
        """Return True if the device is past the event, or the host alone has taken the mark.

        False inside the capture of a CUDA graph, which a question to an event outside of it would break.
        """
        return not isinstance(mark, CudaMark) or (not torch.cuda.is_current_stream_capturing() and mark.event.query())

    def seconds(self, since: float, until: float) -> float:
        """Between two marks, for which the host waits."""
        assert isinstance(since, CudaMark)
        assert isinstance(until, CudaMark)
        since.event.synchronize()
        until.event.synchronize()
        return float(since.event.elapsed_time(until.event)) * MILLISECOND

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self._index)


def clock_of(device: torch.device) -> Clock:
    """The one that tells when a device has done things."""
    return CudaClock(device) if device.type == "cuda" else Clock()
