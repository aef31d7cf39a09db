"""The order in which slices leave, planned from measured steps and agreed on through rank 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..buckets.assignment import BucketPlan
from ..planning.bounds import optimal, synchronous
from ..planning.replay import backward_order, planned_order, replay
from ..planning.step_model import StepModel
from ..transport.collectives import spread
from .bucket_order import INTERVAL
from .measured_step import Measurements

ORDERS = ("auto", "priority", "backward", "synchronous")
FIRST_LOOK = 8  # steps with the same buckets, some of which have been measured
MEASURED = 4  # steps before a look that wait where parameters are needed, so that it is known where
WORTH = 0.97  # of a step's seconds: what a plan must promise


@dataclass(frozen=True)
class Bounds:
    """Seconds of a step: of the best one that any order allows (T*), and of one that waits at backward's end."""

    optimal: float
    synchronous: float


class SliceOrder:
    """Decides between steps, on all ranks alike, in which order `plan` sends, and whether updates wait for their use.

    `wanted`: one of `ORDERS`. "backward" and "synchronous" are never planned. "priority" always takes the planned order;
    "auto" only one that promises 3 %, against waiting at the end of backward. On CUDA, whose times the host does not know,
    nothing is planned.
    """

    def __init__(self, wanted: str, plan: BucketPlan, group: dist.ProcessGroup, device: torch.device) -> None:
        self._wanted, self._plan, self._group, self._device = wanted, plan, group, device
        self._plans = wanted in ("auto", "priority") and device.type != "cuda"
        self.measurements = Measurements()
        self.bounds: Bounds | None = None
        self._builds = plan.builds
        self._since = 0  # steps when these were made
        self._looked_at = -1
        self._overlaps = wanted not in ("synchronous", "auto")
        self._planned = False

    @property
    def name(self) -> str:
        """What is in use."""
        return "synchronous" if not self._overlaps else "priority" if self._planned else "backward"

    def overlaps(self, steps: int) -> bool:
        """Whether the step after so many waits where parameters are needed."""
        measures = self._plans and self._till_look(steps - self._since) <= MEASURED
        return self._overlaps or measures

    def _till_look(self, age: int) -> int:
        return FIRST_LOOK - age if age < FIRST_LOOK else INTERVAL - age % INTERVAL

    def look(self, steps: int) -> None:
        """Now and then: take rank 0's order. `steps`: so far. A collective call, of all ranks at the same step."""
        if self._plan.builds != self._builds:
            self._restart(steps)
        age = steps - self._since
        due = age == FIRST_LOOK or (age and age % INTERVAL == 0)
        if not due or not self._plans or steps == self._looked_at:  # forwards inside no_sync are no steps
            return
        self._looked_at = steps
        told = torch.tensor(self._proposal(), device=self._device)
        spread([told], 0, self._group, what="the order of slices")
        overlaps, planned, *order = told.tolist()
        self._overlaps, self._planned = bool(overlaps), bool(planned)
        if order != self._numbers():
            self._plan.send_in(order)
            self.measurements.clear()

    def _restart(self, steps: int) -> None:
        self._builds, self._since = self._plan.builds, steps
        self._overlaps, self._planned = self._wanted not in ("synchronous", "auto"), False
        self.measurements.clear()

    def _numbers(self) -> list[int]:
        """Of what is sent, in today's order."""
        return [piece.index() for piece in self._plan.sending]

    def _proposal(self) -> list[int]:
        """This rank's: whether to overlap, whether by a plan, and the order."""
        today = self._numbers()
        model = self.measurements.model([piece.number for piece in self._plan.sending])
        if model is None:
            return [self._overlaps, self._planned, *today]
        self.bounds = Bounds(optimal(model), synchronous(model))
        overlaps, order = self._chosen(model)
        return [overlaps, order != backward_order(model), *(today[place] for place in order)]

    def _chosen(self, model: StepModel) -> tuple[bool, list[int]]:
        """Whether to overlap, and the places of what is sent today in the order to send them."""
        now, order = list(range(len(model.pieces))), planned_order(model)
        planned, today = replay(model, order).step, replay(model, now).step
        if self._wanted == "priority":
            return True, order if planned < WORTH * today or not self._planned else now
        if min(planned, today) > WORTH * synchronous(model):
            return False, sorted(now, key=self._numbers().__getitem__)
        return True, order if planned < WORTH * today else now
