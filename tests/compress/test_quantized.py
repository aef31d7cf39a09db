"""Few bits an element, against numpy, and what is drawn at random."""

import numpy
import pytest
import torch

from gradwire.compress import Gathered, Int4, Int8, Simulation, Ternary, compressor, state

from .given import gradients, layout, mean

SPECS = {
    "int8": (127, 127.0),
    "int4": (7, 8.0),
    "ternary": (1, 2.25),
}  # the largest code; scales up to the largest magnitude
STOCHASTIC = [f"{name}:rounding=stochastic" for name in SPECS]


def quantized(vector, block, limit, steps):
    """Blocks of the nearest multiples of a scale, in float64, the scale as it travels; the last block may be short."""
    parts = [vector[start : start + block] for start in range(0, len(vector), block)]
    scales = [numpy.float64(numpy.float32(numpy.abs(part).max() / steps)) for part in parts]
    return numpy.concatenate(
        [scale * numpy.rint(part / scale).clip(-limit, limit) for part, scale in zip(parts, scales, strict=True)]
    )


def averages(spec, within, steps=4, seed=0):
    simulation = Simulation(compressor(spec), within)
    return [simulation.step(gradients(within, seed + step))[0] for step in range(steps)], simulation


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("world_size", "part"), [(1, 64), (2, 32), (4, 16)])
def test_two_shot_quantizes_each_rank_s_gradient_then_each_server_s_mean(world_size, part, spec, feedback):
    within = layout((64,), dtype=torch.float64, world_size=world_size)
    simulation = Simulation(compressor(f"{spec}:block=16,error_feedback={feedback}"), within)
    worker, server = numpy.zeros((world_size, 64)), numpy.zeros(64)
    for step in range(3):
        given = gradients(within, step)
        corrected = numpy.stack([gradient.numpy() for gradient in given]) + worker
        said = numpy.stack([quantized(row, 16, *SPECS[spec]) for row in corrected])
        served = said.mean(0) + server
        starts = range(0, 64, part)
        average = numpy.concatenate([quantized(served[start : start + part], 16, *SPECS[spec]) for start in starts])
        if feedback:
            worker, server = corrected - said, served - average
        assert all(numpy.allclose(out.numpy(), average, atol=1e-5) for out in simulation.step(given))


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_the_mean_of_many_random_averages_without_feedback_is_the_mean_gradient(spec):
    within, steps = layout((40, 25)), 400
    given = gradients(within)
    simulation = Simulation(compressor(f"{spec},block=8,error_feedback=false"), within)
    found = sum(simulation.step(given)[0].double() for _ in range(steps)) / steps
    coarsest = 2 * max(gradient.abs().max() for gradient in given)  # of an average, twice rounded by less than a scale
    assert (found - mean(given)).abs().max() <= 5 * coarsest / steps**0.5


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_random_rounding_is_repeated_by_the_same_steps_and_leaves_the_users_numbers_alone(spec):
    within, before = layout((700,)), torch.get_rng_state()
    first, simulation = averages(spec, within)
    again, _ = averages(spec, within)
    assert all(map(torch.equal, first, again))
    assert torch.equal(torch.get_rng_state(), before)
    for states in simulation.states:
        state.set_step(states, 1)  # what a loaded state, or a step that is taken back, goes on from
    fresh = Simulation(simulation.compressor, within)
    for states in fresh.states:
        state.set_step(states, 1)
    entries = [state.save(states) for states in simulation.states]
    for states, saved in zip(fresh.states, entries, strict=True):
        state.load(states, saved)
    given = gradients(within, 9)
    assert torch.equal(simulation.step(given)[0], fresh.step(given)[0])


@pytest.mark.parametrize("codec", [Int8, Int4, Ternary])
def test_ranks_steps_buckets_and_rounds_draw_apart(codec):
    gradient = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    drawing = Gathered(codec(rounding="stochastic"))

    def said(names, rank, step):
        within = layout((4096,), names=names, world_size=4)
        simulation = Simulation(drawing, within)
        state.set_step(simulation.states[rank], step)
        zeros = [torch.zeros(4096) if other != rank else gradient for other in range(4)]
        return simulation.step(zeros)[0]

    drawn = [said(["a"], 0, 0), said(["a"], 1, 0), said(["a"], 0, 1), said(["b"], 0, 0)]
    assert not any(torch.equal(one, other) for index, one in enumerate(drawn) for other in drawn[:index])
    assert torch.equal(drawn[0], said(["a"], 0, 0))


@pytest.mark.parametrize("spec", [*SPECS, *STOCHASTIC])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_spoils_its_block_of_the_average_on_every_rank(spec, bad):
    within = layout((1000,), world_size=3)
    given = gradients(within)
    given[1][300] = bad
    for average in Simulation(compressor(spec), within).step(given):
        assert not average[300].isfinite()
        assert average[384:].isfinite().all()


@pytest.mark.parametrize("codec", [Int8(), Int4(), Ternary(), Int4(block=24), Ternary(block=8)])
def test_rows_are_whole_words_of_16_bytes_and_hold_codes_and_scales(codec):
    for numel in (1, 8, 127, 128, 129, 1009):
        length = codec.row_length(numel)
        blocks = -(-length // codec.block)
        size = codec.row_bytes(length)
        assert length >= numel
        assert size % 16 == 0
        assert length * codec.bits / 8 + 4 * blocks <= size < length * codec.bits / 8 + 4 * blocks + 20
