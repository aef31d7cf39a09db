"""A user's communication hook as what averages buckets; and all that the reducer knows to do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..buckets.slices import Sendable
from ..engine.lanes import FuturePending
from ..measure.step import Step
from .averager import CompressedAverager


class HookAverager:
    """Calls `hook(state, bucket)`, as torch's DDP does. `own`: the compression that it calls, where it is gradwire's."""

    scale = 1.0  # it divides by itself

    def __init__(self, state: object, hook: Callable[..., Any]) -> None:
        self.state, self.hook = state, hook
        own = getattr(state, "averager", None)
        self.own = own if isinstance(own, CompressedAverager) else None
        self._step = Step()
        if self.own is not None:
            self.own.begun_by_reducer = True

    @property
    def zero_unused_gradients(self) -> bool:
        """A hook of gradwire's may remember what it is given."""
        return self.own is not None and self.own.zero_unused_gradients

    def begin_step(self, step: Step) -> None:
        """Whatever its index, the next bucket is the first of a step."""
        before, self._step = self._step, step
        if self.own is None:
            step.number = before.number + 1
        else:
            self.own.begin_step(step)

    def average(self, bucket: Sendable) -> FuturePending:
        """Call the hook. It returns a future, or anything else that can be waited for."""
        future = self.hook(self.state, bucket)
        self._step.watch(bucket.number, future)
        return FuturePending(future)

    def end_step(self) -> None:
        """End the step, and the own compression's, where the hook is gradwire's."""
        if self.own is not None:
            self.own.end_step()
