"""Means in few bits: what ranks have in a mean is that mean, and it is as near to the true one as two roundings allow."""

import pytest
import torch

from gradwire.compress.algorithms.powersgd import CODECS, PowerSGD, coded_mean
from gradwire.compress.simulate import requests_in, simulate

from ..given import gradients, layout, placed


def mean_of(codec, values, rank, world_size=2):
    return coded_mean(codec, placed(layout(tuple(values.shape), world_size=world_size), rank=rank)).mean(values)


def means(codec, given, world_size):
    """What each rank gets and has in it, in float64."""
    found = simulate([mean_of(codec, values.clone(), rank, world_size) for rank, values in enumerate(given)])
    return [mean.double() for mean, _ in found], [sent.double() for _, sent in found]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", [1, 5, 128, 1009])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_mean_of_what_ranks_have_in_it_is_the_mean_that_all_get(numel, world_size, codec):
    given = gradients(layout((numel,), world_size=world_size))
    got, sent = means(codec, given, world_size)
    assert all(torch.equal(mean, got[0]) for mean in got)
    assert torch.allclose(sum(sent) / world_size, got[0], atol=2e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_an_element_is_off_by_half_a_step_of_each_rounding_at_most(world_size):
    given = gradients(layout((1009,), world_size=world_size))
    exact = sum(values.double() for values in given) / world_size
    steps = [values.abs().max().item() / 127 for values in given]
    bound = sum(steps) / world_size / 2 + (exact.abs().max().item() + max(steps)) / 127 / 2
    assert (means("int8", given, world_size)[0][0] - exact).abs().max() <= bound * (1 + 1e-6)


def test_what_the_ranks_gave_stays_as_it_was_and_nothing_is_sent_of_nothing():
    given = gradients(layout((300,)))
    kept = [values.clone() for values in given]
    simulate([mean_of("int8", values, rank) for rank, values in enumerate(given)])
    assert all(map(torch.equal, given, kept))
    assert simulate([mean_of("int8", torch.empty(0), rank) for rank in range(2)])[0][0].numel() == 0


@pytest.mark.parametrize("shapes", [((64, 48),), ((64, 48), (64,), (30, 20), (7,))])
def test_what_is_sent_whole_rides_with_a_factor_in_its_rounds(shapes):
    bucket = layout(*shapes, world_size=3)
    state = PowerSGD(2, payload="int4").init(bucket)
    grad = gradients(bucket)[0]
    assert len(list(requests_in(PowerSGD(2, payload="int4").reduce(grad, state), bucket.ranks))) == 4
