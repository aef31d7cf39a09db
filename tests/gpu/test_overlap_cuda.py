"""Overlap with the next forward on CUDA: the same bits as without it, and updates that are under way after a step."""

import pytest
import torch
from torch import nn

import gradwire

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WIDTH, STEPS = 64, 12


def trained(rank, order, spec, device):
    """Parameters and momenta after some steps of layers and a tied weight; whether each step left updates under way."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    layers[3].weight = layers[0].weight
    model = gradwire.DistributedDataParallel(layers.to(device), compressor=spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = gradwire.overlap(model, optimizer, order=order, slice_mb=0.002)
    inputs = torch.Generator().manual_seed(rank)
    pending = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, generator=inputs).to(device)).square().mean().backward()
        optimizer.step()
        pending.append(model._overlap.pending)
    state = optimizer.state_dict()["state"]
    numbers = [*model.state_dict().values(), *(each for fields in state.values() for each in fields.values())]
    model.compression.close()
    return [each.cpu() for each in numbers], pending


def both(rank, world_size, order, spec, device="cuda"):
    expected, never = trained(rank, "synchronous", spec, device)
    found, pending = trained(rank, order, spec, device)
    return all(map(torch.equal, expected, found)), any(never), pending


@pytest.mark.parametrize("spec", ["none", "bf16", "int8", "powersgd:rank=2"])
@pytest.mark.parametrize("order", ["backward", "priority", "auto"])
def test_with_overlap_the_same_bits_come_out(ranks, order, spec):
    for same, never, pending in ranks.run(both, 2, order, spec, timeout=200):
        assert same
        assert not never
        assert pending == [order != "auto"] * STEPS
