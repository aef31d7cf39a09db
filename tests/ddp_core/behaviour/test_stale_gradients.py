"""Parameters that a step leaves out: what they hold back waits, whatever lies in their `.grad`."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire

from ..nets import same

WIDTH = 10
SPECS = ["topk:ratio=0.1", "powersgd:rank=1", "onebit:error_feedback=1", "batched-powersgd:rank=1"]


class Heads(nn.Module):
    """A common layer, and two heads of which a step uses one."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(6)
            self.common, self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, inputs, head):
        return getattr(self, head)(self.common(inputs))


def inputs_of(rank, step):
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def left_out(rank, world_size, spec, cleared):
    """What head `a` holds back after a step that used it and two that did not; its old gradient is cleared, or stays."""
    model = gradwire.DistributedDataParallel(Heads(), compressor=spec, find_unused_parameters=True)
    for step, head in enumerate("abb"):
        model(inputs_of(rank, step), head).square().sum().backward()
        model.module.common.weight.grad = None
        model.module.b.weight.grad = None
        if cleared:
            model.module.a.weight.grad = None
    held = [numbers.flatten() for numbers in model.compression.state_dict()["parameters"]["a.weight"].values()]
    return held, model.module.a.weight.grad


@pytest.mark.parametrize("spec", SPECS)
def test_an_old_gradient_of_a_parameter_that_nobody_used_is_not_taken_for_a_new_one(ranks, spec):
    cleared, kept = (ranks.run(left_out, 2, spec, cleared) for cleared in (True, False))
    for (expected, none), (held, gradient) in zip(cleared, kept, strict=True):
        assert none is None
        assert gradient.any()
        assert same(held, expected)


def give(given, gradient):
    given += gradient


def swapped_away(rank, world_size, spec, cleared):
    """Head `a`: the mean of what was given, and what came back, where the step after a swap to `none` left it out.

    Gradients are cleared after every step, or that of head `a` only before the step that uses it again.
    """
    model = gradwire.DistributedDataParallel(Heads(), compressor=spec, find_unused_parameters=True)
    given, got = torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)
    for step, head in enumerate("aabba"):
        if step == 2:
            model.compression.swap("none")
        if cleared or head == "a":
            model.zero_grad()
        hook = model.module.a.weight.register_hook(partial(give, given))
        model(inputs_of(rank, step), head).square().sum().backward()
        hook.remove()
        if head == "a":
            got += model.module.a.weight.grad
    dist.all_reduce(given)
    return given / world_size, got


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_a_swap_before_a_step_that_leaves_a_parameter_out_loses_nothing_of_it(ranks, spec, cleared):
    for given, got in ranks.run(swapped_away, 2, spec, cleared):
        torch.testing.assert_close(got, given, rtol=1e-4, atol=1e-4)
