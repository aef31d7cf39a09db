"""Quantisers whose mean is exact without error feedback: unbiased, with the variance that their papers prove."""

import pytest
import torch

from gradwire.compress import Gathered, Simulation, compressor
from gradwire.compress.baselines.natural import Natural
from gradwire.compress.baselines.qsgd import QSGD
from gradwire.compress.baselines.terngrad import TernGrad

from ..given import gradients, layout, mean

SIZE, DRAWS = 1000, 100
EIGHTH = 1 / 8
CODECS = {  # codec: the bound of its error's mean square over the vector's square, for its block
    QSGD(): min(128 / 127**2, 128**0.5 / 127),
    QSGD(levels=7, block=64): min(64 / 7**2, 64**0.5 / 7),
    QSGD(levels=1, block=16): 16**0.5,
    Natural(): EIGHTH,
    Natural(block=8): EIGHTH,
    TernGrad(clip=None, block=16): (1 + 16**0.5) / 2 - 1,
}
SPECS = ["qsgd", "qsgd:levels=7", "natural", "terngrad:clip=none,block=64"]


def vector():
    """Normal numbers, every fourth of them much smaller; a part of the last block lies behind the end."""
    numbers = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    return numbers * torch.tensor([1.0, 1.0, 1.0, 1e-3]).repeat(SIZE // 4)


def draws(codec, given):
    """What many encodings of one vector by one rank say, (draws, elements)."""
    simulation = Simulation(Gathered(codec), layout((SIZE,), world_size=1))
    return torch.stack([simulation.step([given])[0] for _ in range(DRAWS)]).double()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_mean_of_many_encodings_is_the_vector_and_their_variance_below_the_bound(codec):
    given = vector()
    said = draws(codec, given)
    variance = (said - given).square().sum(1).mean() / given.double().square().sum()
    assert 0 < variance <= CODECS[codec]
    assert (said.mean(0) - given).square().sum() <= 1.3 * variance * given.square().sum() / DRAWS


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_mean_over_steps_of_the_average_is_the_mean_gradient(spec, world_size):
    within = layout((40, 25), world_size=world_size)
    given, simulation = gradients(within), Simulation(compressor(spec), within)
    found = torch.stack([simulation.step(given)[0].double() for _ in range(DRAWS)])
    assert (found.mean(0) - mean(given)).abs().max() <= 6 * found.std(0).max() / DRAWS**0.5


@pytest.mark.parametrize("levels", [1, 7, 127])
def test_levels_of_qsgd_are_equal_parts_of_the_norm(levels):
    given = vector()
    said = draws(QSGD(levels=levels, block=SIZE), given)[:20]
    steps = said / given.double().norm() * levels
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    assert (steps - given / given.norm() * levels).abs().max() < 1.0001


def test_terngrad_clips_at_so_many_root_mean_squares_and_says_three_values_a_block():
    given = torch.ones(64)
    given[5] = -100.0
    limit = 2.5 * (63 / 64 + 100**2 / 64) ** 0.5
    said = draws(TernGrad(block=64), torch.cat([given, torch.ones(SIZE - 64)]))
    assert said[:, 5].unique().tolist() == pytest.approx([-limit], rel=1e-5)
    assert set(said[:, :5].unique().tolist()) <= {0.0, *said[:, 5].neg().unique().tolist()}
    assert said[:, 64:].unique().tolist() == [1.0]  # nothing to clip, and nothing to draw


def test_with_error_feedback_qsgd_is_a_contraction_even_with_one_level():
    """Without the division by 1 + variance (Beznosikov et al. 2020) what is held back would grow by the step."""
    simulation = Simulation(compressor("qsgd:levels=1,block=1000,error_feedback=true"), layout((SIZE,), world_size=1))
    given = vector()
    said = simulation.step([given])[0]
    assert (said - given).norm() < given.norm()


def test_qsgd_takes_the_fewest_bits_that_hold_its_levels():
    assert [QSGD(levels=levels).bits for levels in (1, 2, 7, 8, 127)] == [2, 4, 4, 8, 8]
