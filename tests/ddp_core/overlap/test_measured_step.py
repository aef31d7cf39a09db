"""What a planner is told of steps: times without waits, the link's seconds, by whatever clock they were noted."""

from gradwire.ddp_core.measure.clock import Clock
from gradwire.ddp_core.measure.step import Record
from gradwire.ddp_core.measure.step_model import Piece, StepModel
from gradwire.ddp_core.overlap.measured_step import Measurements, NotedStep, unhindered


def program(sent, *waits, scope="all"):
    """The record of one whose requests sent so many bytes each, and waited so."""
    return Record([(scope, 0, sent)] * len(waits), [("encode", 0.0, 0.0), *(("wait", *wait) for wait in waits)])


def step(mark=float, start=100.0):
    """Two buckets: ready after 1 and 3 s; needed after 4 and 1 s of a forward of 7 s, and 3 s of waits."""

    def at(seconds):
        return mark(start + seconds)

    records = [program(10.0, (at(1), at(2)), (at(2), at(4))), program(30.0, (at(3), at(7)))]
    waits = [(at(16), at(17)), (at(11), at(13))]
    return NotedStep(at(0), {0: at(1), 1: at(3)}, (at(10), at(20)), waits, records)


def test_waits_are_taken_out_of_a_forward_and_of_the_times_when_it_needs_things():
    found = step().measured(Clock())
    assert (found.forward, found.backward) == (7.0, 3.0)
    assert found.ready == [1.0, 3.0]
    assert found.needed == [4.0, 1.0]
    assert found.requests == [[10.0, 10.0], [30.0]]
    assert found.samples == [(10.0, 1.0), (10.0, 2.0), (30.0, 3.0)]  # the last had the link after the one before it
    assert found.exposed == 3.0


def test_what_is_waited_for_before_or_after_a_forward_is_none_of_it():
    assert unhindered([(-3.0, 2.0), (1.0, 0.5), (9.0, 4.0)], 8.0) == ([0.0, 1.0, 8.5], 0.5)


def test_a_model_has_the_pieces_in_the_order_sent_and_the_link_s_cost():
    measurements = Measurements(Clock())
    assert measurements.model([1, 0]) is None
    measurements.add(step())
    model = measurements.model([1, 0])
    assert (model.forward, model.backward) == (7.0, 3.0)
    assert [(piece.ready, piece.needed) for piece in model.pieces] == [(3.0, 1.0), (1.0, 4.0)]
    assert measurements.exposed == 3.0
    assert measurements.model([0]) is None  # others were sent


def test_marks_of_streams_that_wait_for_each_other_nowhere_make_a_model_still():
    backwards = NotedStep(9.0, {0: 8.0, 1: 7.0}, (6.0, 5.0), [(4.0, 3.0), (2.0, 1.0)], [program(8.0, (3.0, 2.0))] * 2)
    measurements = Measurements(Clock())
    measurements.add(backwards)
    assert measurements.model([0, 1]) == StepModel(0.0, 0.0, (Piece(0.0, 0.0, 0.0),) * 2)


def test_requests_that_send_nothing_tell_nothing_of_the_link():
    nothing = NotedStep(0.0, {0: 1.0}, (2.0, 4.0), [(3.0, 3.0)], [program(0.0, (1.0, 1.5))])
    measurements = Measurements(Clock())
    measurements.add(nothing)
    assert measurements.model([0]) is None
    assert measurements.exposed == 0.0
