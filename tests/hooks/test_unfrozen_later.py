"""A parameter that is unfrozen after wrapping, and so in no bucket, is named at the first step that trains it."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

FROZEN_STEPS = 5


def named_at(rank, world_size, own):
    """The steps at which a warning names the parameter."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    net[0].requires_grad_(False)
    model = gradwire.DistributedDataParallel(net, compressor="int8") if own else TorchDDP(net)
    handle = model.compression if own else gradwire.attach(model, "int8")
    steps = []
    for step in range(FROZEN_STEPS + 3):
        net[0].requires_grad_(step >= FROZEN_STEPS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(2, 4)).sum().backward()
        steps += [step for each in caught if "0.weight" in str(each.message)]
    handle.close()
    return steps


@pytest.mark.parametrize("own", [False, True], ids=["attach", "own DDP"])
def test_the_first_step_with_an_unfrozen_parameter_names_it(ranks, own):
    assert ranks.run(named_at, 2, own) == [[FROZEN_STEPS]] * 2
