"""Codecs as compressors: every payload to everyone, or a server for each part."""

import numpy
import pytest

from gradwire.compress import Gathered, OneBit, Simulation, TopK, TwoShot, compressor
from gradwire.compress.state.tree import Leaves as leaves_of

from ..given import gradients, layout
from ..test_laws import ROUNDING


def largest(vector, k):
    kept = numpy.zeros_like(vector)
    chosen = numpy.argsort(-numpy.abs(vector), kind="stable")[:k]
    kept[chosen] = vector[chosen]
    return kept


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gathered_is_the_mean_of_what_each_rank_says(world_size):
    within = layout((9, 7), world_size=world_size)
    given = gradients(within)
    expected = sum(largest(gradient.double().numpy(), 5) for gradient in given) / world_size
    for out in Simulation(Gathered(TopK(k=5)), within).step(given):
        assert numpy.allclose(out.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("spec", [*ROUNDING, "int4:error_feedback=false", "onebit:error_feedback=0,start_iter=2"])
def test_without_error_feedback_nothing_is_remembered(spec):
    state = Simulation(compressor(spec), layout((100,))).states[0]
    assert leaves_of(state).flat == ()
    assert leaves_of(state).save() == {}


@pytest.mark.parametrize("numel", [1, 2, 7, 8, 9, 100, 1009])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_servers_parts_cover_the_bucket_once(numel, world_size):
    within = layout((numel,), world_size=world_size)
    states = Simulation(TwoShot(OneBit(block=8)), within).states
    served = [
        list(range(state.server_residual.start, state.server_residual.start + state.server_residual.flat.numel()))
        for state in states
    ]
    assert [index for part in served for index in part] == list(range(numel))
