"""A whole step in one compiled function, with its backward and the optimizer, trains as the same step in Python.

torch 2.8 compiles the optimizer's arithmetic to what rounds another way.
"""

import warnings

import pytest
import torch
from torch import nn

import gradwire

from ...torch_versions import fsdp_of_others
from ..wrapping import wrapped

WIDTH, STEPS = 8, 5
SPEC = "topk:ratio=0.3"


class Net(nn.Module):
    """Layers of which some steps leave the last one out."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs, whole):
        hidden = self.first(inputs).tanh()
        return self.last(hidden) if whole else hidden


def torch_s(unused):
    return *wrapped(False, Net(), SPEC, find_unused_parameters=unused), None


def own(unused):
    return *wrapped(True, Net(), SPEC, find_unused_parameters=unused), None


def overlapped(unused):
    model, handle, _ = own(unused)
    return model, handle, gradwire.overlap(model, torch.optim.SGD(model.parameters(), 0.1))


def sharded(unused):
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model)
    return model, gradwire.attach(model, gather="int8", reduce="int4"), None


def trained(rank, build, unused, compiled):
    torch.manual_seed(0)
    model, handle, optimizer = build(unused)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)

    def step(inputs, whole):
        optimizer.zero_grad()
        model(inputs, whole).square().mean().backward()
        optimizer.step()

    run = torch.compile(step, backend="eager") if compiled else step
    generator = torch.Generator().manual_seed(rank)
    for number in range(STEPS):
        run(torch.randn(4, WIDTH, generator=generator), not unused or number % 2 == 0)
    parameters = [getattr(each, "_local_tensor", each).detach().clone() for each in model.parameters()]
    handle.close()
    return parameters


def both(rank, world_size, build, unused):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [trained(rank, build, unused, compiled) for compiled in (False, True)]


@pytest.mark.parametrize(
    ("build", "unused"),
    [
        *[(torch_s, True), (own, False), (overlapped, False), pytest.param(sharded, False, marks=fsdp_of_others)],
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((torch_s, False), (own, True))),
    ],
)
def test_a_compiled_step_trains_as_one_in_python(ranks, build, unused):
    for in_python, compiled in ranks.run(both, 2, build, unused, timeout=100):
        torch.testing.assert_close(compiled, in_python)
