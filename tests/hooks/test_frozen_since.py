"""A state of a model some of whose parameters are frozen since: all else is loaded, and a warning names what is left out."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import gradients

SHAPES = ((40, 30), (40,), (10, 200), (3,))
FROZEN = ("p1", "p2")
SPECS = ["topk:ratio=0.05", "onebit:error_feedback=1", "powersgd:rank=2", "int8:error_feedback=1", "dgc:ratio=0.1"]


class Some(nn.Module):
    """As `Given`, but parameters that do not train take no part."""

    def __init__(self, frozen=()):
        super().__init__()
        for index, shape in enumerate(SHAPES):
            name = f"p{index}"
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=name not in frozen))

    def forward(self, given):
        pairs = zip(self.parameters(), given, strict=True)
        return sum((parameter * gradient).sum() for parameter, gradient in pairs if parameter.requires_grad)


def attached(spec, ours, frozen=()):
    if ours:
        model = gradwire.DistributedDataParallel(Some(frozen), compressor=spec, bucket_cap_mb=0.002)
        return model, model.compression
    model = TorchDDP(Some(frozen), bucket_cap_mb=0.002)
    return model, gradwire.attach(model, spec)


def frozen_since(rank, world_size, spec, ours, resize):
    """What averages bring out of what was held back, and what was; what was logged; how a state of another model is met."""
    model, handle = attached(spec, ours)
    for step in range(3):
        model(gradients(rank, step, SHAPES)).backward()
        model.zero_grad()
    state = handle.state_dict()
    states = [None] * world_size
    torch.distributed.all_gather_object(states, state)
    handle.swap("none")
    model([torch.zeros(shape) for shape in SHAPES]).backward()
    expected = {name: each.grad.clone() for name, each in model.module.named_parameters() if name not in FROZEN}
    handle.close()
    model, handle = attached(spec, ours, FROZEN)
    records, listener = [], logging.Handler()
    listener.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("gradwire").addHandler(listener)
    handle.load_state_dict(states, resize=True) if resize else handle.load_state_dict(state)
    logging.getLogger("gradwire").removeHandler(listener)
    saved = handle.state_dict()
    wrong = {**state, "parameters": {**state["parameters"], "other": {"residual": torch.zeros(3)}}}
    with pytest.raises(ValueError, match="other"):
        handle.load_state_dict(wrong)
    handle.swap("none")
    model([torch.zeros(shape) for shape in SHAPES]).backward()
    found = {name: each.grad.clone() for name, each in model.module.named_parameters() if name not in FROZEN}
    handle.close()
    return expected, found, records, set(saved["parameters"])


@pytest.mark.parametrize("resize", [False, True])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_what_still_trains_is_loaded_and_the_rest_is_named(ranks, spec, ours, resize):
    for rank, (expected, found, records, saved) in enumerate(ranks.run(frozen_since, 2, spec, ours, resize)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert max(each.abs().max() for each in expected.values()) > 0.01
        told = [each for each in records if "frozen" in each]
        assert all("p1, p2" in each for each in told)
        assert bool(told) == (rank == 0 or resize)
        assert saved.isdisjoint(FROZEN)
