"""Moments of a step, on the host or on a GPU, by one clock for every DistributedDataParallel."""

from __future__ import annotations

import time
from typing import Protocol, TypeAlias

import torch

Moment: TypeAlias = "float | torch.cuda.Event"


class Clock(Protocol):
    """`mark` is now; `seconds` is the time between two marks, once the device has reached them."""

    def mark(self) -> Moment:
        """Now, in the order of the device's work."""

    def seconds(self, begin: Moment, end: Moment) -> float:
        """From one mark to another."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""


class HostClock:
    """The host's, for CPUs."""

    def mark(self) -> Moment:
        """The monotonic clock."""
        return time.perf_counter()

    def seconds(self, begin: Moment, end: Moment) -> float:
        """The difference."""
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin

    def synchronize(self) -> None:
        """The host is always there."""


class GPUClock:
    """Events on the current stream, since the host runs ahead of the GPU."""

    def mark(self) -> Moment:
        """An event behind the work given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Moment, end: Moment) -> float:
        """The time between two events that have happened."""
        assert isinstance(begin, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1000

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return GPUClock() if device.type == "cuda" else HostClock()
