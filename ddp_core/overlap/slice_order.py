"""The slices of an overlapped step: the amount of gradient that is sent at once, and the order in which slices leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...compress import Compressor, Layout, Ranks
from ...compress.simulate import steady_traffic
from ...compress.state.shares import placed_on_hosts
from ..averaging.averager import CompressedAverager
from ..buckets.assignment import DEFAULT_CAP_MB, MEBIBYTE, BucketAssignment
from ..measure.clock import clock_of
from ..transport.protocol import Transport
from ..transport.rank_messages import broadcast
from .link_schedule import arrivals, backward_order, optimal, priority_order, step_seconds, synchronous
from .measured_step import Measurements
from .step_model import StepModel

ORDERS = ("auto", "priority", "backward", "synchronous")
FIRST_UPDATE = 8  # steps with the same buckets, some of which have been measured
INTERVAL, LONGEST = 64, 1024  # steps between two updates, at first and at most
MEASURED = 4  # steps before an update that wait where parameters are needed, so that it is known where
WORTH = 0.97  # of a step's seconds: what another order must promise
PARTS = 8  # of a model, at least
LEAST_GRADIENT_MB, MOST_ON_WIRE_MB = 2.0, 2.0  # of a slice


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
        needed, today = (step_seconds(model, arrivals(model, each)) for each in (order, now))
        if self._wanted == "priority":
            return True, order if needed < WORTH * today or not self._by_need else now
        if min(needed, today) > WORTH * synchronous(model):
            return False, sorted(now, key=self._numbers().__getitem__)
        return True, order if needed < WORTH * today else now


SIDES = (1024, 1024)  # of the matrix that `shrinks` tries


def slice_of_gradient(smaller: float, whole_mb: float, slice_mb: float | None) -> float:
    """MiB of gradient in a slice, of `whole_mb` in all, where a compressor sends `smaller` times as little.

    `slice_mb`: on the wire. None is an eighth of all, since the first layers wait for the rest of their slice, but 2 MiB at
    least, since each costs calls and latency; and 2 MiB on the wire at most. However little of it travels, a slice has no
    more gradient than a bucket of DDP's.

    >>> slice_of_gradient(1.0, 100.0, None), slice_of_gradient(4.0, 100.0, None), slice_of_gradient(16.0, 100.0, None)
    (2.0, 8.0, 12.5)
    """
    on_wire = slice_mb or MOST_ON_WIRE_MB
    most = on_wire * max(1.0, min(smaller, DEFAULT_CAP_MB / on_wire))
    return most if slice_mb else min(most, max(LEAST_GRADIENT_MB, whole_mb / PARTS))


def slice_bytes(averager: CompressedAverager, whole: int, slice_mb: float | None) -> int:
    """Bytes of gradient in a slice, of `whole` in all, as far as a large matrix tells: see `slice_of_gradient`."""
    compressor = averager.memory.compressor
    smaller = shrinks(compressor, placed_on_hosts(compressor, averager.engines.ranks))
    return max(1, int(slice_of_gradient(smaller, whole / MEBIBYTE, slice_mb) * MEBIBYTE))


def shrinks(compressor: Compressor, ranks: Ranks) -> float:
    """Return the bytes of an uncompressed all-reduce of a large matrix, divided by the bytes that the compressor sends.

    The rank of a host that sends most counts, since one may send all of the matrix: the ratio is the same on all ranks.
    """
    places = (dataclasses.replace(ranks, rank=rank) for rank in range(ranks.per_host))
    layouts = [Layout(("weight",), (SIDES,), torch.float32, torch.device("meta"), place) for place in places]
    sent = max(steady_traffic(compressor, [layout]).sent_bytes for layout in layouts)
    return 2 * (ranks.world_size - 1) / ranks.world_size * 4 * layouts[0].numel / sent if sent else 1.0
