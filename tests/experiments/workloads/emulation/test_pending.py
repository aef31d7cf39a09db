"""An emulated layer waits for parameters whose update is pending, as a real one does; what a study says if not."""

import pytest
import torch

from gradwire.ddp_core.measure.link_schedule import arrivals, backward_order, priority_order, step_seconds
from gradwire.ddp_core.overlap.pending_parameter import mark_pending, restore
from gradwire.experiments.workloads.emulation import EmulatedModel
from gradwire.experiments.workloads.emulation.step_model import layered

from .given import TRACE

INPUTS = torch.zeros(1)
WIRE = (0.10, 0.05, 0.0, 0.01, 0.02)  # seconds of each layer
ORDERS = {"backward": backward_order, "priority": priority_order}


class Pending(torch.nn.Parameter):
    """A parameter whose average is still on its way: whoever computes with it waits until `arrives`."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        for each in args:
            if isinstance(each, Pending):
                each.__class__ = torch.nn.Parameter
                each.clock.now = max(each.clock.now, each.arrives)
        return function(*args, **(kwargs or {}))


def forward_seconds(model, clock, moments):
    """Of the emulated forward, if the parameters of each layer arrive so many seconds after its beginning."""
    for layer, seconds in zip(TRACE.layers, moments, strict=True):
        for name in layer.parameters:
            parameter = model.get_parameter(layer.full(name))
            parameter.clock, parameter.arrives = clock, clock.now + seconds
            parameter.__class__ = Pending
    begin = clock.now
    model(INPUTS)
    return clock.now - begin


@pytest.fixture(params=ORDERS)
def planned(request):
    """A step on a slow link in some order, and when the pieces of each layer arrive, counted from backward's end."""
    layers = zip(TRACE.layers, WIRE, strict=True)
    model = layered((layer.forward_seconds, layer.backward_seconds, wire) for layer, wire in layers)
    arrived = arrivals(model, ORDERS[request.param](model))
    exposed = step_seconds(model, arrived) - model.computation
    assert exposed > 0.01
    return exposed, [moment - TRACE.backward_seconds for moment in arrived]


def test_a_forward_takes_what_the_schedule_of_the_link_says(clock, planned):
    exposed, moments = planned
    found = forward_seconds(EmulatedModel(TRACE), clock, moments)
    assert found == pytest.approx(TRACE.forward_seconds + exposed, abs=2 * clock.oversleep)


def test_what_a_sleep_lasts_too_long_is_not_taken_off_twice_where_a_layer_waits(clock):
    """The first layer ends late, and the second waits longer than that: its seconds count in full from there."""
    seconds = forward_seconds(EmulatedModel(TRACE), clock, (0.0, 0.05, 0.0, 0.0, 0.0))
    assert seconds == pytest.approx(0.05 + TRACE.forward_seconds - 0.01, abs=1.01 * clock.oversleep)


class Update:
    """Of one parameter of an overlapped model: notes when it was made."""

    def __init__(self, name, parameter, made):
        self.name, self.parameter, self.made = name, parameter, made
        mark_pending(parameter, self)

    def settle(self):
        self.made.append(self.name)
        restore(self.parameter)


def test_the_updates_of_overlap_are_made_layer_by_layer_in_the_order_of_forward(clock):
    model, made = EmulatedModel(TRACE), []
    for name, parameter in reversed(list(model.named_parameters())):
        Update(name, parameter, made)
    model(INPUTS)
    assert made == list(TRACE.parameters)
