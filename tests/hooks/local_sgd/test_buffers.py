"""Buffers, such as running means: forwards change them while an average travels, and nothing of that is lost."""

import pytest
import torch

from gradwire import LocalSteps

from .sites import together

SITES, STEPS, MEAN = 2, 12, 5.0


class Counting(torch.nn.Module):
    """A layer whose buffers are the number of its forwards, times a factor, and the running mean of its inputs."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.layers = factor, torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs):
        self.count += self.factor
        return self.layers(self.norm(inputs))


def trained(site, at, **options):
    """The model, its buffers before the last average, and LocalSteps."""
    torch.manual_seed(0)
    model = Counting(site + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local = LocalSteps(model, optimizer, at=at, every=4, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((2, 4), MEAN) + torch.tensor([[-1.0], [1.0]])).square().mean().backward()
        optimizer.step()
    before = [each.clone() for each in (model.count, model.norm.running_mean)]
    local.synchronize()
    after = [each.clone() for each in (model.count, model.norm.running_mean)]
    local.finish()
    return before, after


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_while_averages_travel_buffers_keep_what_forwards_make_of_them(places, fragments):
    made = [places(SITES) for _ in range(SITES)]
    found = together(SITES, lambda site: trained(site, made[site], fragments=fragments))
    for site, (before, after) in enumerate(found):
        assert before[0] == STEPS * (site + 1)
        torch.testing.assert_close(before[1], torch.full((4,), MEAN * (1 - 0.9**STEPS)))
        assert after[0] == STEPS * (1 + SITES) / 2
        torch.testing.assert_close(after[1], before[1])


def test_where_no_average_travels_buffers_are_averaged_with_the_last_fragment(places):
    made = [places(SITES) for _ in range(SITES)]
    found = together(SITES, lambda site: trained(site, made[site], fragments=2, overlap=False))
    assert [before[0] for before, _ in found] == [STEPS * (1 + SITES) / 2] * SITES
