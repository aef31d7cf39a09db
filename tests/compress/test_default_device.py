"""torch's default device is where the user wants new tensors: what compresses gradients elsewhere does not mind it."""

import pytest
import torch

from gradwire.compress import Layout, Ranks, compressor, compressors
from gradwire.compress.simulate import Simulation

LAYOUT = Layout(("weight", "bias"), ((12, 20), (20,)), torch.float32, torch.device("cpu"), Ranks(2))
MORE = ["powersgd:rank=2,warm_start=false", "fp16+powersgd:rank=1"]


def averages(spec):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(260, generator=generator, device="cpu") for _ in range(2)]
    simulation = Simulation(compressor(spec), LAYOUT)
    return [average for _ in range(2) for average in simulation.step(gradients)]


@pytest.mark.parametrize("spec", [*compressors(), *MORE])
def test_gradients_on_the_cpu_are_averaged_whatever_the_default_device(spec):
    expected = averages(spec)
    with torch.device("meta"):
        found = averages(spec)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
