"""The replay of a whole step: against the schedule of the link alone, and against closed forms of what it adds."""

import random

import pytest

from gradwire.ddp_core.measure.link_schedule import arrivals, backward_order, priority_order, step_seconds, synchronous
from gradwire.experiments.advice.shared_cores import Machine, Work
from gradwire.experiments.advice.simulated_step import Parcel, Pipeline, Round
from gradwire.experiments.workloads.emulation.step_model import layered

IDLE = Work()


def parcel(ready=0.0, needed=0.0, *rounds, copy=0.0, decode=0.0, update=0.0):
    """Of (arithmetic, wire, latency) a round, none of which wants cores."""
    made = tuple(Round(Work(each[0]), Work(each[1]), each[2]) for each in rounds)
    return Parcel(ready, needed, Work(copy), made, Work(decode), Work(update))


def step(*parcels, forward=1.0, backward=2.0, cores=1.0):
    return Pipeline(Work(forward), Work(backward), parcels, cores)


def drawn(seed):
    generator = random.Random(seed)
    return layered([tuple(generator.uniform(0.1, 2.0) for _ in range(3)) for _ in range(generator.randint(1, 9))])


def of(model, order):
    """A step whose parcels are a model's pieces: wire alone."""
    pieces = [model.pieces[index] for index in order]
    made = [parcel(piece.ready, piece.needed, (0.0, piece.wire, 0.0)) for piece in pieces]
    return step(*made, forward=model.forward, backward=model.backward)


@pytest.mark.parametrize("seed", range(10))
def test_of_wire_alone_a_step_is_that_of_the_link(seed):
    model = drawn(seed)
    waiting, planned = backward_order(model), priority_order(model)
    assert of(model, waiting).seconds() == pytest.approx(synchronous(model))
    assert of(model, planned).seconds(until_needed=True) == pytest.approx(step_seconds(model, arrivals(model, planned)))


def test_a_synchronous_step_copies_averages_back():
    one = parcel(2.0, 0.5, (0.0, 1.0, 0.0), copy=0.01)
    assert step(one).seconds() == pytest.approx(2.0 + 0.01 + 1.0 + 0.01 + 1.0)


def test_one_lane_encodes_the_next_parcel_while_another_one_decodes():
    """Encoding takes 1 second each, the wire nothing, decoding 1: the second decodes while nothing else is left."""
    two = [parcel(0.0, 0.0, (1.0, 0.0, 0.0), decode=1.0)] * 2
    assert step(*two, forward=0.0, backward=0.0).seconds() == pytest.approx(3.0)


def test_latency_does_not_hold_the_link_and_wire_does():
    fast, slow = ([parcel(0.0, 0.0, (0.0, wire, latency))] * 3 for wire, latency in ((0.0, 1.0), (1.0, 0.0)))
    assert step(*fast, forward=0.0, backward=0.0).seconds() == pytest.approx(1.0)
    assert step(*slow, forward=0.0, backward=0.0).seconds() == pytest.approx(3.0)


@pytest.mark.parametrize(("busy", "seconds"), [(0.0, 1.0), (1.0, 3.0)])
def test_what_goes_through_a_host_s_memory_holds_no_link_and_shares_its_cores(busy, seconds):
    three = [Parcel(0.0, 0.0, IDLE, (Round(IDLE, Work(1.0, busy), in_host=True),))] * 3
    assert step(*three, forward=0.0, backward=0.0).seconds() == pytest.approx(seconds)
    after = parcel(0.0, 0.0, (0.0, 3.0, 0.0))
    assert step(*three, after, forward=0.0, backward=0.0).seconds() == pytest.approx(max(3.0, seconds))


def test_forward_waits_where_it_needs_a_parcel_and_updates_it_there():
    one = parcel(2.0, 0.5, (0.0, 1.0, 0.0), update=0.25)
    assert step(one).seconds(until_needed=True) == pytest.approx(2.0 + 1.0 + 0.25 + 0.5)
    assert step(one).seconds() == pytest.approx(2.0 + 1.0 + 0.25 + 1.0)


def seconds_of(cores, *works):
    """Until all of some works are done, begun together."""
    machine = Machine(cores)
    for work in works:
        machine.start(each for each in [work])
    machine.run()
    return machine.now


def test_cores_are_shared_and_no_work_is_lost_or_made():
    whole = Work(1.0, cores=1.0)
    assert seconds_of(1.0, whole, whole) == pytest.approx(2.0)
    assert seconds_of(2.0, whole, whole) == pytest.approx(1.0)
    assert seconds_of(1.0, whole, Work(3.0, cores=1.0)) == pytest.approx(4.0)
    assert seconds_of(0.5, Work(1.0, cores=0.5), Work(1.0, cores=0.5)) == pytest.approx(2.0)
