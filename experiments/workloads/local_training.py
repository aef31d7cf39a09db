"""Models that train by local steps, in place of averaging every gradient."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn

from ...compress import Optimizers, Traffic
from ...ddp_core import Decorator
from ...hooks.local_sgd.local_steps import LocalSteps
from ...hooks.local_sgd.outer import outer
from ..results.comparison import Seconds
from .communication import Communication
from .order import BACKWARD

FRAGMENTS = 4  # as gradwire.LocalSteps has it


def check_local(every: int, specification: str, parallel: str, order: str) -> None:
    """Raise ValueError for options out of range, and for those that local steps have nothing to do with."""
    if every < 1:
        raise ValueError(f"local_every is at least 1, or 0 for none; got {every}")
    if parallel != "ddp" or order != BACKWARD:
        raise ValueError("local SGD trains the bare model: leave out parallel and order")
    outer(specification)


class LocalTraining:
    """Local steps that have not begun: their optimizers come later."""

    def __init__(
        self, spec: str, every: int, specification: str, timeout: timedelta, transport: Decorator | None
    ) -> None:
        self._fragments = min(FRAGMENTS, every)
        self._made = partial(
            LocalSteps,
            every=every,
            outer=specification,
            compressor=spec,
            fragments=self._fragments,
            timeout=timeout,
            transport=transport,
        )

    def begin(self, model: nn.Module, optimizer: Optimizers, at: Any = None) -> Callable[[], None]:
        """Have the optimizers' steps counted; return the function to call at the end, which makes all models the same.

        `at`: finds the sites, by default all ranks of the process group.
        """
        self._local = self._made(model, optimizer, at=at)
        return self._local.synchronize

    def of_steps(self, steps: int) -> Communication:
        """What so many optimizer steps have sent, each its share."""
        history = self._local.history
        payload, sent = sum(each.payload_bytes for each in history), sum(each.sent_bytes for each in history)
        traffic = Traffic(len(history), round(payload / steps), sent / steps)
        seconds = Seconds(encode=0.0, wait=self._local.waited / steps, decode=0.0)
        return Communication(traffic, sent, seconds, self._local.round // self._fragments)

    def close(self) -> None:
        """End it."""
        self._local.close()
