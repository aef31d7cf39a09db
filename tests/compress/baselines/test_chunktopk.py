"""Chunks of largest norm: chosen by all ranks together, against numpy."""

import numpy
import pytest
import torch

from gradwire.compress import Simulation, compressor, dry_run

from ..given import assert_steps_of, gradients, layout

CHUNK = 16
SPEC = f"chunktopk:ratio=0.1,chunk={CHUNK}"
SHAPES = ((24, 31), (5,))  # 749 elements: 46 chunks and 13 elements behind them
SENT = 5


def largest(values, chunk=CHUNK, count=SENT):
    """Which elements are sent: the chunks of largest root mean square, in the mean over ranks, and those behind."""
    whole = values[0].size // chunk * chunk
    squares = [numpy.square(v[:whole]).reshape(-1, chunk).mean(axis=1) for v in values]
    norms = numpy.mean(numpy.sqrt(squares), axis=0)
    sent = numpy.arange(values[0].size) >= whole
    for index in numpy.argsort(-norms, kind="stable")[:count]:
        sent[index * chunk : (index + 1) * chunk] = True
    return sent


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_step_averages_the_largest_chunks_of_gradient_and_residual(world_size, feedback):
    within = layout(*SHAPES, dtype=torch.float64, world_size=world_size)
    assert_steps_of(SPEC, within, lambda values, *_: numpy.where(largest(values), values, 0), feedback)


@pytest.mark.parametrize("shape", [(3,), (CHUNK,), (CHUNK + 3,), (2 * CHUNK,)], ids=str)
def test_where_all_chunks_are_sent_nobody_asks_for_norms(shape):
    within = layout(shape)
    given = gradients(within)
    spec = f"chunktopk:ratio=1,chunk={CHUNK}"
    assert dry_run(compressor(spec), within).rounds == 1
    assert torch.equal(Simulation(compressor(spec), within).step(given)[0], (given[0] / 2).add_(given[1] / 2))


def test_norms_in_float16_hold_what_sums_of_magnitudes_would_not():
    within = layout((40 * 512,), world_size=2)
    given = torch.ones(within.numel).mul_(1e4)
    given[7 * 512 : 8 * 512] *= 2
    output = Simulation(compressor("fp16+chunktopk"), within).step([given, given])[0]
    assert output.view(40, 512).any(dim=1).nonzero().flatten().tolist() == [7]
    assert output.max().item() == pytest.approx(2e4, rel=1e-3)


def test_of_equal_norms_the_lower_chunks_are_sent():
    within = layout((10 * CHUNK,))
    output = Simulation(compressor(f"chunktopk:ratio=0.3,chunk={CHUNK}"), within).step([torch.ones(10 * CHUNK)] * 2)[0]
    assert output.tolist() == [1.0] * 3 * CHUNK + [0.0] * 7 * CHUNK
