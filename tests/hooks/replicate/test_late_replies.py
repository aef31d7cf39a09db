"""Averages of replicated modules may come late: backward goes on meanwhile, and no bit changes."""

from datetime import timedelta
from threading import Event

import pytest
import torch

import gradwire
from gradwire.ddp_core.transport.protocol import Decorated

from .given import inputs, network


class Gated(Decorated):
    """Replies that nobody is given before the gate is open."""

    def __init__(self, inner, gate):
        super().__init__(inner)
        self._gate = gate

    def start(self, request, channel):
        return Behind(self.inner.start(request, channel), self._gate)


class Behind:
    def __init__(self, pending, gate):
        self._pending, self._gate = pending, gate

    def wait(self, timeout):
        assert self._gate.wait(timeout.total_seconds()), "nobody has opened the gate: backward waits"
        return self._pending.wait(timeout)

    def __getattr__(self, name):
        return getattr(self._pending, name)


def opened_in_backward(rank, world_size, spec):
    """The gradient of a backward whose first module alone opens the gate of all replies."""
    model, gate = network(), Event()
    handle = gradwire.attach(model, spec, transport=lambda inner: Gated(inner, gate), timeout=timedelta(seconds=20))

    def watch(module, given, output):
        output.register_hook(lambda _: gate.set())

    model[0].register_forward_hook(watch)
    model(inputs(rank, 0)).square().mean().backward()
    handle.close()
    return model[0].weight.grad.to_local().clone()


@pytest.mark.parametrize("spec", ["none", "int8", "powersgd:rank=2"])
def test_backward_goes_on_while_averages_of_later_modules_are_under_way(ranks, spec):
    first, second = ranks.run(opened_in_backward, 2, spec)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
