"""Samples of how error feedback fares, against whole vectors in float64."""

import math

import pytest
import torch

from gradwire.compress import Simulation, compressor
from gradwire.compress.state.gauge import ELEMENTS, EVERY, IN_A_ROW, WARM_UP, Sample, gauges, sampled, steady
from gradwire.testing import SHAPES

from ..given import gradients, layout

LATE = WARM_UP * EVERY


def gauge_of(state):
    return next(gauges(state))


def sample_of(gradient, before, after):
    """Of all elements, in float64."""
    gradient, before, after = (each.double() for each in (gradient, before, after))
    meant, sent, unit = gradient + before, gradient + before - after, gradient.norm()
    products = ((after, after), (meant, sent), (meant, meant), (sent, sent))
    return Sample(math.log(unit), *(torch.dot(*pair).item() / unit.item() ** 2 for pair in products))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", [SHAPES["layers"], ((1,),)], ids=["layers", "one element"])
def test_small_buckets_are_measured_whole_at_every_16th_step(dtype, shapes):
    within = layout(*shapes, dtype=dtype, world_size=1)
    simulation = Simulation(compressor("topk:ratio=0.1"), within)
    state = simulation.states[0]
    for step in range(1, 3 * EVERY + 1):
        (given,), before = gradients(within, step), state.residual.flat.clone()
        simulation.step([given])
        if step < EVERY:
            assert gauge_of(state).residual_ratio is gauge_of(state).cosine is None
        if step % EVERY == 0:
            whole = sample_of(given, before, state.residual.flat)
            assert gauge_of(state).newest == pytest.approx(whole, rel=1e-3, abs=1e-6)
            held = state.residual.flat.norm() / given.float().norm()
            assert gauge_of(state).residual_ratio == pytest.approx(held.item(), rel=1e-3)


@pytest.mark.parametrize("numel", [0, 1, ELEMENTS, 2 * ELEMENTS, 25 * 2**18])
def test_a_sample_of_a_large_bucket_is_small_and_meets_every_column(numel):
    flat = sampled(torch.arange(numel, device="cpu"))
    assert min(numel, ELEMENTS // 2) <= len(flat) <= 2 * ELEMENTS
    assert not numel or flat[0] == 0
    assert numel < 2**20 or len(set((flat[:512] % 512).tolist())) == 512


def test_a_sample_of_a_large_bucket_says_what_the_whole_bucket_says():
    within = layout((512, 1024), world_size=1)
    simulation = Simulation(compressor("ternary"), within)
    state = simulation.states[0]
    for step in range(EVERY):
        (given,), before = gradients(within, step), state.residual.flat.clone()
        simulation.step([given])
    whole = sample_of(given, before, state.residual.flat)
    assert gauge_of(state).residual_ratio == pytest.approx(whole.ratio, rel=0.05)
    assert gauge_of(state).cosine == pytest.approx(whole.cosine, rel=0.05)


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "ternary", "chunktopk:ratio=0.2,chunk=8,error_feedback=1"])
def test_with_gradients_that_do_not_depend_on_each_other_a_residual_settles_where_it_should_and_does_not_run_away(spec):
    within = layout((64, 32), world_size=1)
    simulation = Simulation(compressor(spec), within)
    for step in range(2 * LATE):
        simulation.step(gradients(within, step))
    gauge = gauge_of(simulation.states[0])
    assert gauge.residual_ratio == pytest.approx(steady(gauge.cosine), rel=0.15)
    assert not gauge.runs_away


def test_a_residual_many_times_larger_than_gradients_make_it_runs_away():
    within = layout((64, 32), world_size=1)
    simulation = Simulation(compressor("topk:ratio=0.01"), within)
    for step in range(LATE + IN_A_ROW * EVERY):
        assert not gauge_of(simulation.states[0]).runs_away
        (given,) = gradients(within, step)
        simulation.step([given if step < LATE else given / 100])
    assert gauge_of(simulation.states[0]).runs_away


def test_gradients_that_grow_and_grow_with_a_residual_run_away_from_the_first_samples_on():
    within, ran_away = layout((64, 32), world_size=1), {}
    for spec in ("topk:ratio=0.01", "int4"):
        simulation = Simulation(compressor(spec), within)
        for step in range(6 * EVERY):
            simulation.step([gradients(within, step)[0] * 1.2**step])
        ran_away[spec] = gauge_of(simulation.states[0]).runs_away
    assert ran_away == {"topk:ratio=0.01": True, "int4": False}
