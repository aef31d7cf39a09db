"""Deep gradient compression, against algorithm 1 of the paper in numpy; and its own law of conservation."""

import math

import numpy
import pytest
import torch

from gradwire.compress import Simulation, compressor, dry_run
from gradwire.compress.algorithms.payload import padded

from ..given import assert_goes_on_after_a_load, gradients, layout

SHAPES = ((24, 31), (5,))
SIZE = 24 * 31 + 5
SPEC = "dgc:ratio=0.05"


def largest(values, ratio):
    """Which elements have the largest magnitudes."""
    chosen = numpy.zeros(values.size, dtype=bool)
    chosen[numpy.argsort(-numpy.abs(values), kind="stable")[: math.ceil(ratio * values.size)]] = True
    return chosen


class Rank:
    """One rank of the algorithm: momentum correction, masking, and clipping by a norm."""

    def __init__(self, momentum=0.9, limit=math.inf):
        self.momentum, self.limit = momentum, limit
        self.velocity, self.waiting = numpy.zeros(SIZE), numpy.zeros(SIZE)

    def step(self, gradient, ratio):
        """What it sends."""
        gradient = gradient * min(1.0, self.limit / numpy.linalg.norm(gradient))
        self.velocity = self.momentum * self.velocity + gradient
        self.waiting = self.waiting + self.velocity
        chosen = largest(self.waiting, ratio)
        sent = numpy.where(chosen, self.waiting, 0)
        self.velocity, self.waiting = numpy.where(chosen, 0, self.velocity), self.waiting - sent
        return sent


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("clip", [None, 5.0])
def test_every_step_is_that_of_the_paper(world_size, momentum, clip):
    within = layout(*SHAPES, dtype=torch.float64, world_size=world_size)
    options = f"momentum={momentum}" + (f",clip={clip}" if clip else "")
    simulation = Simulation(compressor(f"{SPEC},{options}"), within)
    ranks = [Rank(momentum, clip / world_size**0.5 if clip else math.inf) for _ in range(world_size)]
    for step in range(6):
        given = gradients(within, step)
        expected = numpy.mean([rank.step(g.numpy(), 0.05) for rank, g in zip(ranks, given, strict=True)], axis=0)
        for output in simulation.step(given):
            assert numpy.allclose(output.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conservation_what_momentum_adds_comes_out_or_waits_and_what_was_sent_has_no_momentum(dtype):
    """The sum of momentum that entered is the average and what waits; masking forgets momentum alone, where it was sent."""
    within = layout(*SHAPES, dtype=dtype, world_size=2)
    simulation = Simulation(compressor(SPEC), within)
    for step in range(5):
        given = gradients(within, step)
        old = [(state.velocity.flat.clone(), state.residual.flat.clone()) for state in simulation.states]
        average = simulation.step(given)[0].double()
        entered = sum(0.9 * u.double() + g.double() + v.double() for (u, v), g in zip(old, given, strict=True)) / 2
        waiting = sum(state.residual.flat.double() for state in simulation.states) / 2
        assert (entered - average - waiting).abs().max() <= 5e-6
        for (u, _), gradient, state in zip(old, given, simulation.states, strict=True):
            full = torch.add(gradient, u, alpha=0.9)
            masked = state.velocity.flat != full
            assert masked.sum() == math.ceil(0.05 * SIZE)
            assert not state.velocity.flat[masked].any()


def test_the_warm_up_sends_a_quarter_a_16th_a_64th_a_250th_and_then_what_is_asked_for():
    within = layout((10_000,), world_size=1)
    simulation = Simulation(compressor("dgc:warmup_steps=8"), within)
    shares = [(simulation.step(gradients(within, step))[0] != 0).sum().item() for step in range(10)]
    assert shares == [2500, 2500, 625, 625, 157, 157, 40, 40, 10, 10]
    for step, share in ((0, 2500), (7, 40), (8, 10)):
        assert dry_run(compressor("dgc:warmup_steps=8"), within, step).payload_bytes == padded(8 * share)


def test_a_loaded_state_goes_on_as_if_nothing_had_been():
    assert_goes_on_after_a_load(compressor(SPEC), layout(*SHAPES))
