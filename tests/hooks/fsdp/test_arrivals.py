"""Where a step begins and ends: with the outermost backward, also after one that broke off."""

from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.hooks.fsdp.arrivals import Arrivals

from .given import mesh_of


class Done:
    """Gradients that are there."""

    def wait(self, timeout):
        """Nothing to wait for."""


class Noted(list):
    """The beginnings and ends of steps, and when ranks agree before an end."""

    def begin(self):
        self.append("begin")

    def end(self):
        self.append("end")

    inside = True  # as an averager that takes part in each step


def arrivals_of(noted, model):
    return Arrivals(noted, model, torch.device("cpu"), timedelta(seconds=10), lambda: noted.append("agree"))


@pytest.fixture
def steps():
    """Noted steps, and a function whose backward brings gradients of a module."""
    noted = Noted()
    arrivals = arrivals_of(noted, nn.Identity())

    def comes(_):
        arrivals.begin(noted)
        arrivals.take(Done(), at_once=False)

    def module(numbers):
        numbers = numbers * 2
        if numbers.requires_grad:  # not in the forward of a checkpoint
            numbers.register_hook(comes)
        return numbers

    return noted, module


def test_backwards_inside_of_one_belong_to_its_step(steps):
    noted, module = steps
    for _ in range(2):
        numbers = checkpoint(lambda each: module(module(each)), torch.ones(3, requires_grad=True), use_reentrant=True)
        module(module(numbers)).sum().backward()
    assert noted == ["begin", "agree", "end"] * 2


def test_a_backward_after_one_that_broke_off_begins_a_step(steps):
    noted, module = steps
    numbers = torch.ones(3, requires_grad=True) * 3
    numbers.register_hook(lambda _: pytest.fail("on purpose"))
    with pytest.raises(pytest.fail.Exception):
        module(module(numbers)).sum().backward()
    assert noted == ["begin"]
    module(torch.ones(3, requires_grad=True)).sum().backward()
    assert noted == ["begin", "begin", "agree", "end"]


def test_a_backward_of_a_model_that_begins_with_one_inside_of_it_is_one_step():
    noted, model = Noted(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    arrivals = arrivals_of(noted, model)

    def comes(*_):
        arrivals.begin(noted)
        arrivals.take(Done(), at_once=False)

    for part in model:
        part.register_full_backward_hook(comes)
        part.forward = partial(checkpoint, part.forward, use_reentrant=True)
    for _ in range(2):
        model(torch.ones(3, requires_grad=True)).sum().backward()
    assert noted == ["begin", "agree", "end"] * 2


def test_a_backward_that_brings_no_gradients_of_modules_is_no_step():
    noted, model = Noted(), nn.Linear(3, 3)
    arrivals = arrivals_of(noted, model)
    outputs = model(torch.ones(3))
    outputs.register_hook(lambda _: noted.append(arrivals._backwards.now() is not None))
    outputs.sum().backward()
    assert noted == [True]


class Checkpointed(nn.Module):
    """Three modules, of which the middle one is computed anew in backward, or all are `everywhere`."""

    def __init__(self, *, everywhere):
        super().__init__()
        torch.manual_seed(0)
        self.everywhere = everywhere
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, inputs):
        if not self.everywhere:
            return self.last(checkpoint(self.middle, self.first(inputs).tanh(), use_reentrant=True).tanh())
        numbers = inputs.requires_grad_()
        for part in (self.first, self.middle, self.last):
            numbers = checkpoint(part, numbers, use_reentrant=True).tanh()
        return numbers


def totals(rank, world_size, reduce, everywhere):
    """The sums of some steps' averages; what is held back after them; the number of steps."""
    model, mesh, steps = Checkpointed(everywhere=everywhere), mesh_of(world_size), 3
    for part in (model.first, model.middle, model.last, model):
        fully_shard(part, mesh=mesh)
    handle = gradwire.attach(model, reduce=reduce)
    for step in range(steps):  # gradients add up
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * rank + step))
        model(inputs).square().mean().backward()
    (state,) = handle.state_dict().values()
    held = {name: fields["residual"] for name, fields in state["parameters"].items() if fields}
    handle.close()
    return {name: each.grad.full_tensor() for name, each in model.named_parameters()}, held, state["step"]


@pytest.mark.parametrize("everywhere", [False, True])
def test_with_reentrant_checkpoints_no_part_of_a_gradient_is_lost(ranks, everywhere):
    exact = ranks.run(totals, 2, "none", everywhere)[0][0]
    answers = ranks.run(totals, 2, "int4", everywhere)
    for sums, _, steps in answers:
        assert steps == 3
        for name, each in sums.items():
            held = sum(theirs[name] for _, theirs, _ in answers) / 2
            torch.testing.assert_close(each + held, exact[name], rtol=0, atol=1e-6)
