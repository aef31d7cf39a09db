"""One bit an element of rotated blocks, against a Hadamard matrix by its formula, and what that is for."""

import numpy
import pytest
import torch

from gradwire.compress import Gathered, OneBit, Simulation, compressor
from gradwire.compress.simulate import simulate
from gradwire.kernels import Residual
from gradwire.kernels.quantization import uniform

from ...kernels.test_rotation import hadamard, parts
from ..given import gradients, layout


def signs(vector, block):
    """Blocks of mean magnitude times sign, in float64; the last block may be short."""
    parts = [vector[start : start + block] for start in range(0, len(vector), block)]
    return numpy.concatenate([numpy.abs(part).mean() * numpy.where(part >= 0, 1.0, -1.0) for part in parts])


def rotation(numel, block):
    """The matrix that rotates a bucket, in float64, with signs drawn as described."""
    drawn = numpy.where(uniform(0, 0, block, torch.device("cpu")).numpy() < 0.5, -1.0, 1.0)
    matrix = numpy.zeros((numel, numel))
    for start, width in parts(numel, block):
        matrix[start : start + width, start : start + width] = hadamard(width).numpy() * drawn[:width] / width**0.5
    return matrix


@pytest.mark.parametrize("numel", [16, 21, 64])
@pytest.mark.parametrize("feedback", [True, False])
def test_signs_are_those_of_rotated_blocks_and_are_rotated_back(feedback, numel):
    within = layout((numel,), dtype=torch.float64, world_size=1)
    given, matrix = gradients(within)[0], rotation(numel, 16)
    said = matrix.T @ signs(matrix @ given.numpy(), 16)
    residual = torch.zeros(numel, dtype=torch.float64) if feedback else None
    held = None if residual is None else Residual(residual, residual)
    gathered = Gathered(OneBit(block=16))
    sent = simulate([gathered.reduce(given.clone(), gathered.init(within), held)])[0]
    assert numpy.allclose(sent.numpy(), said, atol=1e-5)
    if residual is not None:
        assert numpy.allclose(residual.numpy(), given.numpy() - said, atol=1e-5)


@pytest.mark.parametrize("numel", [1, 2, 7, 9, 100, 1009, 5000])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_servers_decode_the_blocks_that_workers_encode(world_size, numel):
    """Parts begin at whole blocks: two signs in a row of what is the same on all ranks are the signs of the first."""
    within = layout((numel,), world_size=world_size)
    given = gradients(within)[0]
    once = compressor("onebit:block=64,error_feedback=false")
    alone = Simulation(Gathered(OneBit(block=64)), layout((numel,), world_size=1)).step([given])[0]
    assert torch.allclose(Simulation(once, within).step([given] * world_size)[0], alone, atol=1e-5)


def test_heavy_tails_lose_no_more_than_normal_numbers_do():
    """Of a normal vector signs and their mean magnitude lose sqrt(1 - 2 / pi)."""
    within = layout((1 << 14,), world_size=1)
    numbers = torch.Generator().manual_seed(0)
    tails = torch.randn(1 << 14, generator=numbers) * torch.randn(1 << 14, generator=numbers).exp()
    lost = {}
    for rotate in (True, False):
        once = Simulation(compressor(f"onebit:rotate={rotate},error_feedback=false"), within).step([tails])[0]
        lost[rotate] = ((once - tails).norm() / tails.norm()).item()
    assert lost[True] == pytest.approx((1 - 2 / numpy.pi) ** 0.5, abs=0.02)
    assert lost[False] > 0.8
