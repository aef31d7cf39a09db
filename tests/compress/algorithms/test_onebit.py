"""One bit an element of rotated blocks: which blocks there are, and what they are for."""

import numpy
import pytest
import torch

from gradwire.compress import Gathered, OneBit, Simulation, compressor

from ..given import gradients, layout


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
