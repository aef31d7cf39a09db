"""The order in which slices leave, found by replaying measured steps and agreed on through rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..buckets.assignment import BucketAssignment
from ..measure.clock import clock_of
from ..transport.collectives import broadcast
from ..transport.protocol import Transport
from .measured_step import Measurements
from .replay import backward_order, optimal, priority_order, replay, synchronous
from .step_model import StepModel

ORDERS = ("auto", "priority", "backward", "synchronous")
FIRST_UPDATE = 8  # steps with the same buckets, some of which have been measured
INTERVAL, LONGEST = 64, 1024  # steps between two updates, at first and at most
MEASURED = 4  # steps before an update that wait where parameters are needed, so that it is known where
WORTH = 0.97  # of a step's seconds: what another order must promise


class SliceOrder:
    """Decides between steps, on all ranks alike, in which order slices go, and whether updates wait for their use.

    `wanted`: one of `ORDERS`. "backward" and "synchronous" are never replaced. "priority" always takes the order of need;
    "auto" only one that promises 3 %, against waiting at the end of backward. `clock`: takes marks in measured steps, which
    an update turns into seconds; with parameters on several `devices` nothing is measured, and the order stays. `bounds`:
    seconds of a step, of the best one that any order allows (T*) and of one that waits at the end of backward; None before
    anything was measured.
    """

    def __init__(
        self, wanted: str, assignment: BucketAssignment, transport: Transport, devices: Sequence[torch.device]
    ) -> None:
        self._wanted, self._assignment, self._transport, self._device = wanted, assignment, transport, devices[0]
        self._searches = wanted in ("auto", "priority") and len(devices) == 1
        self.clock = clock_of(self._device)
        self.measurements = Measurements(self.clock)
        self.bounds: tuple[float | None, float | None] = (None, None)
        self._next = self._pause = 0  # steps to the next update, and between those before and after the last one
        self._restart(0)

    @property
    def name(self) -> str:
        """The name of the order in use."""
        return "synchronous" if not self._overlaps else "priority" if self._by_need else "backward"

    def overlaps(self, steps: int) -> bool:
        """Return True if the step after `steps` others waits where parameters are needed."""
        return self._overlaps or self.measures(steps)

    def measures(self, steps: int) -> bool:
        """Return True if the step after `steps` others has to be measured, where that is not done by the way."""
        return self._searches and steps - self._since >= self._next - MEASURED

    def update(self, steps: int) -> None:
        """Now and then: take rank 0's order. `steps`: so far. A collective call, of all ranks at the same step."""
        if self._assignment.builds != self._builds:
            self._restart(steps)
        age = steps - self._since
        if age < self._next or not self._searches:
            return
        chosen = torch.tensor(self._proposal(), device=self._device)
        broadcast([chosen], 0, self._transport, what="the order of slices")
        overlaps, by_need, *order = chosen.tolist()
        self._overlaps, self._by_need = bool(overlaps), bool(by_need)
        self._pause = INTERVAL if overlaps else min(2 * self._pause, LONGEST)  # measured steps cost what overlap does
        self._next = age + self._pause
        self.measurements.clear()
        if order != self._numbers():
            self._assignment.send_in(order)

    def _restart(self, steps: int) -> None:
        """With the buckets that there are, after so many steps."""
        self._builds, self._since = self._assignment.builds, steps
        self._next, self._pause = FIRST_UPDATE, INTERVAL // 2
        self._overlaps, self._by_need = self._wanted not in ("synchronous", "auto"), False
        self.measurements.clear()

    def _numbers(self) -> list[int]:
        """Return the indices of all that is sent, in today's order."""
        return [piece.index() for piece in self._assignment.sending]

    def _proposal(self) -> list[int]:
        """This rank's: whether to overlap, whether by need, and the order."""
        today = self._numbers()
        model = self.measurements.model([piece.number for piece in self._assignment.sending])
        if model is None:
            return [self._overlaps, self._by_need, *today]
        self.bounds = optimal(model), synchronous(model)
        overlaps, order = self._chosen(model)
        return [overlaps, order != backward_order(model), *(today[place] for place in order)]

    def _chosen(self, model: StepModel) -> tuple[bool, list[int]]:
        """Return whether to overlap, and the places of what is sent today in the order to send them."""
        now, order = list(range(len(model.pieces))), priority_order(model)
        needed, today = replay(model, order).step, replay(model, now).step
        if self._wanted == "priority":
            return True, order if needed < WORTH * today or not self._by_need else now
        if min(needed, today) > WORTH * synchronous(model):
            return False, sorted(now, key=self._numbers().__getitem__)
        return True, order if needed < WORTH * today else now
