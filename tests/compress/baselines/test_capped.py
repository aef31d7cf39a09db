"""Methods whose payload has as many elements as the values say, up to a cap: against numpy."""

import numpy
import pytest
import torch

from gradwire.compress import Simulation, compressor

from ..given import assert_steps_of, gradients, layout

SHAPES = ((40, 25), (9,))
SPECS = ["dropping:ratio=0.05,cap=0.2", "adacomp:bin=50,cap=0.5"]
SHORT = ["dropping:ratio=0.1,cap=0.03", "adacomp:bin=20,cap=0.03"]  # there is never room for all


def dropped(values, _gradient):
    """Elements from the threshold on: on so few, the sample is all of them."""
    threshold = numpy.sort(numpy.abs(values))[-int(numpy.ceil(0.05 * values.size))]
    return numpy.where(numpy.abs(values) >= threshold, values, 0)


def adapted(values, gradient):
    """Signs times the mean over bins of their largest magnitudes."""
    bins = [values[start : start + 50] for start in range(0, values.size, 50)]
    largest = numpy.array([numpy.abs(part).max() for part in bins])
    chosen = numpy.abs(values + gradient) >= numpy.repeat(largest, 50)[: values.size]
    return numpy.where(chosen, numpy.sign(values) * numpy.float64(numpy.float32(largest.mean())), 0)


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("spec", "sent_of"), list(zip(SPECS, (dropped, adapted), strict=True)))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_step_sends_what_the_paper_says_and_holds_back_the_rest(world_size, spec, sent_of, feedback):
    within = layout(*SHAPES, dtype=torch.float64, world_size=world_size)
    assert_steps_of(spec, within, lambda values, given, _: list(map(sent_of, values, given)), feedback, atol=1e-6)


def test_the_threshold_of_a_sample_lets_through_about_the_part_that_is_aimed_at():
    within = layout((200_000,), world_size=1)
    simulation = Simulation(compressor("dropping:ratio=0.05,sample=0.02,cap=0.2,error_feedback=false"), within)
    shares = [(simulation.step(gradients(within, step))[0] != 0).float().mean().item() for step in range(4)]
    assert len(set(shares)) == 4
    assert all(0.04 < share < 0.06 for share in shares)  # of 4000 elements: 0.05 with a standard deviation of 0.0034


@pytest.mark.parametrize("spec", SHORT)
def test_no_more_is_sent_than_the_cap_and_nothing_waits_forever(spec):
    within = layout((1000,), world_size=1)
    simulation, given = Simulation(compressor(spec), within), gradients(layout((1000,), world_size=1))
    total = torch.zeros(1000)
    for _ in range(300):
        average = simulation.step(given)[0]
        assert (average != 0).sum() <= 30
        total += average
    assert ((total / 300 - given[0]).norm() / given[0].norm()) < 0.3
    assert (total != 0).float().mean() > 0.8


@pytest.mark.parametrize("spec", [*SPECS, *SHORT])
def test_zeros_take_no_room(spec):
    within = layout((1000,))
    sparse = torch.zeros(1000)
    sparse[[3, 700, 998]] = torch.tensor([1.0, -2.0, 3.0])
    simulation = Simulation(compressor(spec), within)
    total = sum(simulation.step([sparse if step == 0 else torch.zeros(1000)] * 2)[0] for step in range(40))
    assert total.nonzero().flatten().tolist() == [3, 700, 998]
    assert not Simulation(compressor(spec), within).step([torch.zeros(1000)] * 2)[0].any()
