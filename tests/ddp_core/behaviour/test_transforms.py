"""Models inside torch.func's transforms, and under compiled autograd: averaged as without, or refused."""

import copy

import pytest
import torch
from torch import nn

import gradwire

from ..wrapping import wrapped

WIDTH, STEPS = 4, 66  # past the look at the order of buckets


class Buffered(nn.Module):
    """A layer and a buffer, which is rank 0's in every forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, inputs):
        return self.layer(inputs).tanh() + self.shift


def inputs_of(rank, step):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model, inputs):
    """Of the output and of its derivative in a direction."""
    output, derivative = torch.func.jvp(model, (inputs,), (torch.ones_like(inputs),))
    return output.square().sum() + derivative.square().sum()


def errors(rank, world_size, unused):
    """How far the last gradients are from the mean of all ranks', where each loss has a jvp in it."""
    torch.manual_seed(0)
    model = gradwire.DistributedDataParallel(Buffered(), find_unused_parameters=unused)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, inputs_of(rank, step)).backward()
        torch.func.grad(lambda inputs: model(inputs).sum())(inputs_of(rank, step))
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    for other in range(world_size):
        loss_of(alone, inputs_of(other, STEPS - 1)).div(world_size).backward()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return max((mine.grad - theirs.grad).abs().max().item() for mine, theirs in pairs)


@pytest.mark.parametrize("unused", [False, True])
def test_gradients_through_jvp_are_averaged(ranks, unused):
    assert max(ranks.run(errors, 2, unused)) < 1e-5


def compiled_backward(rank, world_size, attached, whole):
    """What a training says whose backwards compiled autograd runs, how many steps it comes to, gradients without it then."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model, handle = wrapped(not attached, net, "none")

    def run(inputs):
        model(inputs).square().sum().backward()

    def backward_alone(inputs):
        loss = model(inputs).square().sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()

    torch._dynamo.config.compiled_autograd = whole
    run, text = torch.compile(run, backend="eager") if whole else backward_alone, ""
    try:
        for step in range(3):
            run(inputs_of(rank, step))
    except RuntimeError as error:
        text = str(error)
    finally:
        torch._dynamo.config.compiled_autograd = False
        torch._dynamo.reset()
    if not attached:
        model.zero_grad()
        model(inputs_of(rank, 0)).square().sum().backward()
    handle.close()
    return step, text, [] if attached else [each.grad for each in net.parameters()]


@pytest.mark.parametrize(("attached", "whole"), [(False, False), (True, False), (False, True)])
def test_compiled_autograd_is_refused_in_the_first_step_and_the_next_one_averages_without(ranks, attached, whole):
    answers = ranks.run(compiled_backward, 2, attached, whole, timeout=100)
    for step, text, _ in answers:
        assert step == 0
        assert "python_reducer" in text
    (*_, one), (*_, other) = answers
    assert all(map(torch.equal, one, other))
