"""What is looked at between two steps: gradients that were thrown away, feedback that runs away, time that is left."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...compress import Compressor
from ...compress.gauge import EVERY
from ..measure.step import Step
from ..memory.model_memory import ModelMemory
from .hiding import hiding_of
from .runaway import Runaway
from .thrown_away import ThrownAway


class Inspection:
    """Of one model's steps with a compressor."""

    def __init__(self, compressor: Compressor) -> None:
        self._thrown_away, self._runaway = ThrownAway(), Runaway()
        self.use(compressor)

    def use(self, compressor: Compressor) -> None:
        """Steps are compressed so from now on."""
        self._hiding = hiding_of(compressor)

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """The gradients of these tell whether a step's were thrown away; of none: do not look."""
        self._thrown_away.watch(parameters)

    def end_step(self, memory: ModelMemory, last: Step | None) -> None:
        """Another step begins, so the `last` one, None where there was none like it, stands or is undone."""
        if self._thrown_away.parameters:
            self._thrown_away.look(counts=memory.counts)
        memory.end_step()
        if memory.step % EVERY == 0:
            self._runaway.look(memory.live)
        if self._hiding is not None:
            self._hiding.look(last, memory.step, memory.live)
