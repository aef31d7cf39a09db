"""Chunks of largest norm: chosen by all ranks together, against numpy."""

import numpy
import pytest
import torch

from ..given import assert_steps_of, layout

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
