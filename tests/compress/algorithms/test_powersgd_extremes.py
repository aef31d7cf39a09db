"""PowerSGD where numbers vanish or overflow."""

import pytest
import torch

from gradwire.compress import Layout, PowerSGD, Ranks, Simulation, compressor

WEIGHT = Layout(("weight",), ((64, 48),), torch.float32, torch.device("cpu"), Ranks(2))


@pytest.mark.parametrize("spec", ["powersgd:rank=4", "powersgd:rank=4,power_iterations=2", "batched-powersgd"])
def test_after_a_zero_gradient_it_still_finds_a_gradient_whose_first_rows_are_zero(spec):
    """P is then completed by unit vectors, whose product with such a gradient is zero: Q must not follow."""
    simulation = Simulation(compressor(spec), WEIGHT)
    gradient = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    gradient[:8] = 0
    assert not simulation.step([torch.zeros(WEIGHT.numel)] * 2)[0].any()
    total = torch.zeros(WEIGHT.numel)
    for _ in range(100):
        total += simulation.step([gradient.flatten().clone() for _ in range(2)])[0]
    assert (total / 100 - gradient.flatten()).norm() < 0.2 * gradient.norm()


def test_factors_beyond_float16_are_cut_and_made_up_for_later():
    simulation = Simulation(compressor("fp16+powersgd:rank=2"), WEIGHT)
    gradient = 3e4 * torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).flatten()
    total = torch.zeros(WEIGHT.numel)
    for step in range(300):
        given = gradient if step < 3 else torch.zeros(WEIGHT.numel)
        output = simulation.step([given.clone() for _ in range(2)])[0]
        assert output.isfinite().all()
        total += output
    assert (total - 3 * gradient).norm() < 0.05 * gradient.norm()


def test_a_bare_powersgd_refuses_16_bits():
    narrow = Layout(("weight",), ((64, 48),), torch.bfloat16, torch.device("cpu"), Ranks(2))
    with pytest.raises(TypeError, match="Float32Arithmetic"):
        PowerSGD(1).init(narrow)
