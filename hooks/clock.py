"""Moments of a step, on the host or on a GPU, by one clock for every DistributedDataParallel."""

from __future__ import annotations

import time
from typing import TypeAlias

import torch

Moment: TypeAlias = "float | torch.cuda.Event"


class HostClock:
    """The host's, for CPUs."""

    def mark(self) -> Moment:
        """Now, by the monotonic clock."""
        return time.perf_counter()

    def seconds(self, begin: Moment, end: Moment) -> float:
        """From one mark to another."""
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin

    def synchronize(self) -> None:
        """The host is always there."""


class GPUClock:
    """Events on the current stream, since the host runs ahead of the GPU."""

    def mark(self) -> Moment:
        """Now, in the order of the device's work: an event behind what was given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Moment, end: Moment) -> float:
        """From one mark to another, once the device has reached them."""
        assert isinstance(begin, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1000

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()


Clock: TypeAlias = HostClock | GPUClock


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return GPUClock() if device.type == "cuda" else HostClock()
