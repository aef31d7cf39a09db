"""Moments of a step, on the host or on a GPU, by one clock for every DistributedDataParallel."""

from __future__ import annotations

import time
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

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


class LastGradient:
    """When the last gradient of a backward was there: made before a DDP wraps the model, so that its mark comes first.

    At first it watches all parameters; after `watch_last_only` only the one that came last, which costs the step nothing.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self._clock = clock
        self._last: Tensor | None = None
        self._hooks = {
            p: p.register_post_accumulate_grad_hook(self._ready) for p in model.parameters() if p.requires_grad
        }
        self.moment: Moment | None = None

    def _ready(self, parameter: Tensor) -> None:
        self._last, self.moment = parameter, self._clock.mark()

    def watch_last_only(self) -> None:
        """Go on with the parameter that came last."""
        for parameter, hook in self._hooks.items():
            if parameter is not self._last:
                hook.remove()
