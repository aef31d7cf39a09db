"""Checks between two steps: gradients that were discarded, error feedback that diverges."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from ...compress.state.gauge import EVERY
from ..memory.model_memory import ModelMemory
from .discarded_gradients import DiscardedGradientCheck

ADVICE = (
    "Give the compressor feedback=0.9 or less, an uncompressed warm-up (start_iter=), or guard=true; or lower the learning "
    "rate"
)


class StepChecks:
    """The checks of one model's steps with a compressor."""

    def __init__(self) -> None:
        self._thrown_away, self._warned = DiscardedGradientCheck(), False  # of feedback that runs away

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """The gradients of these tell whether a step's were thrown away; of none: do not look."""
        self._thrown_away.watch(parameters)

    def end_step(self, memory: ModelMemory) -> None:
        """Another step begins, so the last one stands or is undone."""
        if self._thrown_away.parameters:
            self._thrown_away.check(counts=memory.counts)
        memory.end_step()
        if memory.step % EVERY == 0:
            self._look_at_feedback(memory)

    def _look_at_feedback(self, memory: ModelMemory) -> None:
        """Warn once, of the first bucket whose error feedback diverges."""
        for names, bucket in () if self._warned else memory.live:
            gauge = bucket.gauge
            if gauge is not None and gauge.guard is None and gauge.runs_away:
                self._warned = True
                warnings.warn(
                    f"error feedback diverges in the bucket of {names[0]}: the residual is {gauge.residual_ratio:.0f}x the "
                    f"gradient (cosine between intended and sent update {gauge.cosine:.2f}). {ADVICE}",
                    stacklevel=2,
                )
                return
