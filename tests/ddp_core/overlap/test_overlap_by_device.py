"""Orders planned by a device's clock, whose marks tell only afterwards, on real ranks with a stand-in for it."""

from dataclasses import dataclass, field

import pytest

from gradwire.ddp_core import Link, Paced
from gradwire.ddp_core.measure.clock import Clock
from gradwire.ddp_core.measure.link_schedule import optimal, synchronous
from gradwire.ddp_core.overlap import slice_order
from gradwire.ddp_core.overlap.measured_step import Measurements
from gradwire.ddp_core.overlap.slice_order import FIRST_UPDATE, MEASURED
from gradwire.ddp_core.transport.paced import PacedPending

from .late_clock import LateClock
from .overlapped import RATE, Setting, equal
from .test_measured_step import scaled

STEPS = 14
SLOW = RATE / 10  # so that an order of need gains, however busy this machine is


class Unnoted(Paced):
    """A slow link that notes no arrivals: whoever waits does, by the step's clock."""

    def start(self, request, channel):
        pending = super().start(request, channel)
        return Late(pending._real, pending.due)


class Late(PacedPending):
    arrived = property(lambda self: None, lambda self, when: None)  # not known


@dataclass
class Observed:
    """A training by a stand-in's clock. `marks`: taken until the end of each step. `models`: by it, and by the host's."""

    clock: LateClock = field(default_factory=LateClock)
    marks: list = field(default_factory=list)
    models: list = field(default_factory=list)
    exposed: list = field(default_factory=list)

    def watch(self, order):
        """Have looks say that they are, and keep what they find."""
        look, model = order.update, order.measurements.model

        def looking(steps):
            self.clock.looks = True
            look(steps)
            self.clock.looks = False

        def modelled(sending):
            by_host = Measurements(Clock())
            by_host._steps.extend(order.measurements._steps)
            self.models.append((model(sending), by_host.model(sending)))
            return self.models[-1][0]

        order.update, order.measurements.model = looking, modelled


def setting_of(rank, order, spec, slice_mb):
    return Setting(rank, order, compressor=spec, slice_mb=slice_mb, link=lambda inner: Unnoted(inner, Link(SLOW)))


def by_device(rank, world_size, order, spec, slice_mb):
    """Whether the bits are those without overlap; what was observed; the order used, and its age at the end."""
    expected = setting_of(rank, "synchronous", spec, slice_mb)
    for _ in range(STEPS):
        expected.step()
    seen = Observed()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slice_order, "clock_of", lambda device: seen.clock)
        found = setting_of(rank, order, spec, slice_mb)
    used = found.model._overlap.order
    seen.watch(used)
    for _ in range(STEPS):
        found.step()
        report = found.optimizer.report()
        assert ("nothing measured yet" in str(report)) == (report.exposed is None)
        seen.marks.append(seen.clock.taken)
        seen.exposed.append(report.exposed)
    sending, bounds = [each.index() for each in found.model.reducer.assignment.sending], used.bounds
    told = (seen.clock.asked_too_early, seen.marks, seen.models, seen.exposed)
    return equal(expected.end(), found.end()), told, (used.name, sending, bounds), used._since


def numbers(model):
    """All that a model says."""
    return [model.forward, model.backward, *(value for piece in model.pieces for value in vars(piece).values())]


CASES = [("priority", "int8", 0.002), ("priority", "powersgd:rank=2", 0.0001)]


@pytest.mark.parametrize(("order", "spec", "slice_mb"), CASES)
def test_steps_are_planned_by_the_device_s_clock_and_no_bit_changes(ranks, order, spec, slice_mb):
    answers = ranks.run(by_device, 2, order, spec, slice_mb)
    assert len({str(used[:2]) for _, _, used, _ in answers}) == 1  # all take rank 0's
    for same, (asked_too_early, marks, models, exposed), (name, sending, bounds), since in answers:
        assert same
        assert not asked_too_early
        look = since + FIRST_UPDATE
        grown = [step for step in range(1, STEPS) if marks[step] > marks[step - 1]]
        assert grown == list(range(look - MEASURED, look + 1))  # the forward after the last one, too
        ((model, by_host),) = [pair for pair in models if pair[0] is not None]
        assert numbers(model) == pytest.approx(numbers(scaled(by_host)), abs=1e-9)
        assert bounds == (optimal(model), synchronous(model))
        assert exposed[look - 1] is None
        assert exposed[-1] > 0
        if (order, spec) == CASES[0][:2]:  # the others have less to send
            assert name == "priority"
            assert sending != sorted(sending)
