"""Few bits an element, against numpy, and what is drawn at random."""

import numpy
import pytest
import torch

from gradwire.compress import Gathered, Int2, Int4, Int8, Residual, Simulation, TwoShot, compressor, simulate
from gradwire.compress.state import tree as state
from gradwire.kernels.quantization import uniform

from ...kernels.test_rotation import hadamard, parts
from ..given import assert_goes_on_after_a_load, gradients, layout, mean

SPECS = {
    "int8": (127, 127.0, 0.0),
    "int4": (7, 8.0, 0.0),
    "int2": (1.5, 2.0, 0.5),
    "ternary": (1, 2.25, 0.0),
}  # the largest level; scales up to the largest magnitude; how far levels are from whole numbers
ROTATED = [name for name in SPECS if name != "ternary"]
STOCHASTIC = [f"{name}:rounding=stochastic" for name in ROTATED]


def quantized(vector, block, limit, steps, offset):
    """Blocks of the nearest levels times a scale, in float64, the scale as it travels; the last block may be short."""
    parts = [vector[start : start + block] for start in range(0, len(vector), block)]
    scales = [numpy.float64(numpy.float32(numpy.abs(part).max() / steps)) for part in parts]
    levels = [numpy.rint(part / scale - offset) + offset for part, scale in zip(parts, scales, strict=True)]
    return numpy.concatenate([scale * level.clip(-limit, limit) for level, scale in zip(levels, scales, strict=True)])


def signs(vector, block):
    """Blocks of mean magnitude times sign, in float64; the last block may be short."""
    parts = [vector[start : start + block] for start in range(0, len(vector), block)]
    return numpy.concatenate([numpy.abs(part).mean() * numpy.where(part >= 0, 1.0, -1.0) for part in parts])


def coded(name, vector):
    """What a method says of a vector in blocks of 16."""
    return signs(vector, 16) if name == "onebit" else quantized(vector, 16, *SPECS[name])


def rotation(numel, block):
    """The matrix that rotates a bucket: Hadamard's by its formula, and signs drawn as described."""
    drawn = numpy.where(uniform(0, 0, block, torch.device("cpu")).numpy() < 0.5, -1.0, 1.0)
    matrix = numpy.zeros((numel, numel))
    for start, width in parts(numel, block):
        matrix[start : start + width, start : start + width] = hadamard(width).numpy() * drawn[:width] / width**0.5
    return matrix


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("spec", [*SPECS, "onebit"])
@pytest.mark.parametrize(("world_size", "part"), [(1, 64), (2, 32), (4, 16)])
def test_two_shot_rounds_each_rank_s_gradient_then_each_server_s_mean(world_size, part, spec, feedback):
    within = layout((64,), dtype=torch.float64, world_size=world_size)
    more = ",rotate=false" if spec in ("int2", "onebit") else ""
    simulation = Simulation(compressor(f"{spec}:block=16,error_feedback={int(feedback)}{more}"), within)
    worker, server = numpy.zeros((world_size, 64)), numpy.zeros(64)
    for step in range(3):
        given = gradients(within, step)
        corrected = numpy.stack([gradient.numpy() for gradient in given]) + worker
        said = numpy.stack([coded(spec, row) for row in corrected])
        served = said.mean(0) + server
        starts = range(0, 64, part)
        average = numpy.concatenate([coded(spec, served[start : start + part]) for start in starts])
        if feedback:
            worker, server = corrected - said, served - average
        assert all(numpy.allclose(out.numpy(), average, atol=1e-5) for out in simulation.step(given))


@pytest.mark.parametrize("numel", [16, 21, 64])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("spec", [*ROTATED, "onebit"])
def test_rotated_blocks_are_coded_and_rotated_back(spec, feedback, numel):
    within = layout((numel,), dtype=torch.float64, world_size=1)
    gathered = Gathered(compressor(f"{spec}:block=16,rotate=true,error_feedback=true").inner.inner.codec)
    given, matrix = gradients(within)[0], rotation(numel, 16)
    said = matrix.T @ coded(spec, matrix @ given.numpy())
    residual = torch.zeros(numel, dtype=torch.float64)
    held = Residual(residual, residual) if feedback else None
    sent = simulate([gathered.reduce(given.clone(), gathered.init(within), held)])[0]
    assert numpy.allclose(sent.numpy(), said, atol=1e-5)
    assert not feedback or numpy.allclose(residual.numpy(), given.numpy() - said, atol=1e-5)


def test_rotation_keeps_what_an_outlier_would_hide():
    within = layout((128,), world_size=1)
    given = gradients(within)
    given[0][7] = 100.0
    errors = {}
    for rotate in (True, False):
        averaged = Simulation(compressor(f"int4:rotate={rotate},error_feedback=false"), within).step(given)[0]
        errors[rotate] = (averaged - given[0]).abs()[8:].mean().item()
    assert errors[False] == pytest.approx(given[0].abs()[8:].mean().item())  # all of them are lost
    assert errors[True] < 0.75 * errors[False]


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_the_mean_of_many_random_averages_without_feedback_is_the_mean_gradient(spec):
    within, steps = layout((40, 25)), 120
    given = gradients(within)
    simulation = Simulation(compressor(f"{spec},block=8,error_feedback=false"), within)
    found = sum(simulation.step(given)[0].double() for _ in range(steps)) / steps
    coarsest = 2 * max(gradient.abs().max() for gradient in given)  # of an average, twice rounded by less than a scale
    assert (found - mean(given)).abs().max() <= 5 * coarsest / steps**0.5


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_random_rounding_is_repeated_by_the_same_steps_and_after_a_load(spec):
    within = layout((700,))
    first, again = (Simulation(compressor(spec), within) for _ in range(2))
    for step in range(4):
        given = gradients(within, step)
        assert torch.equal(first.step(given)[0], again.step(given)[0])
    assert_goes_on_after_a_load(compressor(spec), within)


@pytest.mark.parametrize("codec", [Int8, Int4, Int2])
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


def test_a_step_s_second_encoding_draws_from_another_counter_than_its_first(monkeypatch):
    seen, encode = [], Int8.encode

    def noting(self, *arguments, **named):
        seen.append((named["key"], named["counter"]))
        encode(self, *arguments, **named)

    monkeypatch.setattr(Int8, "encode", noting)
    within = layout((1352,), world_size=1)  # a bucket that no other test has: its cut keeps the codec's methods
    Simulation(TwoShot(Int8(rounding="stochastic")), within).step([torch.ones(1352)])
    assert len(seen) == len(set(seen)) == 2


@pytest.mark.parametrize("spec", [*SPECS, *STOCHASTIC, "int4:rotate=true"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_spoils_its_block_of_the_average_on_every_rank(spec, bad):
    within = layout((1000,), world_size=3)
    given = gradients(within)
    given[1][300] = bad
    for average in Simulation(compressor(spec), within).step(given):
        assert not average[300].isfinite()
        assert average[384:].isfinite().all()
