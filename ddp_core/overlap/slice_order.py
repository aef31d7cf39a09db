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
from ..measure.link_schedule import arrivals, backward_order, optimal, priority_order, step_seconds, synchronous
from ..transport.protocol import Transport
from ..transport.rank_messages import broadcast
from .measured_step import Measurements

ORDERS = ("priority", "synchronous")
FIRST_UPDATE = 8  # steps with the same buckets, some of which have been measured
INTERVAL = 64  # steps between two updates
MEASURED = 4  # steps before an update whose marks are taken on a GPU
WORTH = (
    0.97  # of a step's seconds: what another planned order must promise, since a change costs the first step after it
)
PARTS = 8  # of a model, at least
LEAST_GRADIENT_MB, MOST_ON_WIRE_MB = 2.0, 2.0  # of a slice


class SliceOrder:
    """Decides between steps, on all ranks alike, in which order slices go: as backward, or by `priority_order`.

    `wanted`: one of `ORDERS`. `clock`: takes marks in measured steps, which an update turns into seconds; with parameters on
    several `devices` nothing is measured, and the order stays backward's. `bounds`: seconds of a step, of the best one that
    any order allows (T*) and of one that waits at the end of backward; None before anything was measured.
    """

    def __init__(
        self, wanted: str, assignment: BucketAssignment, transport: Transport, devices: Sequence[torch.device]
    ) -> None:
        self._assignment, self._transport, self._device = assignment, transport, devices[0]
        self.overlaps = wanted != "synchronous"
        self._plans = self.overlaps and len(devices) == 1
        self.clock = clock_of(self._device)
        self.measurements = Measurements(self.clock)
        self.bounds: tuple[float | None, float | None] = (None, None)
        self._next = FIRST_UPDATE  # steps with these buckets until the next update
        self._restart(0)

    @property
    def name(self) -> str:
        """The name of the order in use."""
        return "synchronous" if not self.overlaps else "priority" if self._by_need else "backward"

    def measures(self, steps: int) -> bool:
        """Return True if the step after `steps` others has to be measured, where that is not done by the way."""
        return self._plans and steps - self._since >= self._next - MEASURED

    def update(self, steps: int) -> None:
        """Now and then: take rank 0's order. `steps`: so far. A collective call, of all ranks at the same step."""
        if self._assignment.builds != self._builds:
            self._restart(steps)
        age = steps - self._since
        if age < self._next or not self._plans:
            return
        chosen = torch.tensor(self._proposal(), device=self._device)
        broadcast([chosen], 0, self._transport, what="the order of slices")
        by_need, *order = chosen.tolist()
        self._by_need, self._next = bool(by_need), age + INTERVAL
        self.measurements.clear()
        if order != self._numbers():
            self._assignment.send_in(order)

    def _restart(self, steps: int) -> None:
        """With the buckets that there are, after so many steps."""
        self._builds, self._since, self._next, self._by_need = self._assignment.builds, steps, FIRST_UPDATE, False
        self.measurements.clear()

    def _numbers(self) -> list[int]:
        """Return the indices of all that is sent, in today's order."""
        return [piece.index() for piece in self._assignment.sending]

    def _proposal(self) -> list[int]:
        """This rank's: whether by need, and the order."""
        today = self._numbers()
        model = self.measurements.model([piece.number for piece in self._assignment.sending])
        if model is None:
            return [self._by_need, *today]
        self.bounds = optimal(model), synchronous(model)
        order, now = priority_order(model), list(range(len(today)))
        planned, unchanged = (step_seconds(model, arrivals(model, each)) for each in (order, now))
        if self._by_need and planned >= WORTH * unchanged:
            order = now
        return [order != backward_order(model), *(today[place] for place in order)]


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
