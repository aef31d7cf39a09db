"""The same function on ranks with torch's DistributedDataParallel and with ours."""

import copy

import torch
from torch import nn

import gradwire

KINDS = {"torch": nn.parallel.DistributedDataParallel, "gradwire": gradwire.DistributedDataParallel}


def both(ranks, function, *args, world_size=2):
    """`function(rank, world_size, DistributedDataParallel, *args)` on every rank: torch's answers, and ours."""
    answers = ranks.run(_on_both, world_size, function, *args)
    return [[theirs for theirs, _ in answers], [ours for _, ours in answers]]


def assert_same(ranks, function, *args, world_size=2, rtol=0.0, atol=0.0):
    """Both give the same on every rank: tensors bit for bit, if no tolerance is given. Returns what they give."""
    theirs, ours = both(ranks, function, *args, world_size=world_size)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    return ours


def assert_all_same(ranks, function, cases, **tolerance):
    """`assert_same` for each of several arguments, in one job; {str(case): the ranks' answers}."""
    ours = assert_same(ranks, _all, function, list(cases), **tolerance)
    return {str(case): [answers[str(case)] for answers in ours] for case in cases}


def _all(rank, world_size, ddp, function, cases):
    return {str(case): function(rank, world_size, ddp, case) for case in cases}


def _on_both(rank, world_size, function, *args):
    return [function(rank, world_size, ddp, *args) for ddp in KINDS.values()]


def error_of(function, *args, **kwargs):
    """The type's name and the text of what a call raises; None if it does not."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def seeded(build, seed=0):
    """A network with the same parameters on all ranks and for both."""
    torch.manual_seed(seed)
    return copy.deepcopy(build())


def batches(rank, count, *shape, seed=1):
    """Inputs of a rank, different on each."""
    generator = torch.Generator().manual_seed(seed + 1000 * rank)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def train(model, inputs, learning_rate=0.1):
    """A step of SGD for each input; the gradients of each step, then the parameters, by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    seen = []
    for each in inputs:
        optimizer.zero_grad()
        model(each).square().mean().backward()
        seen.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return seen, {name: p.detach().clone() for name, p in model.named_parameters()}


def mlp():
    """Three layers, one of them big enough for a bucket of its own at a cap of 0.01 MiB."""
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


class Blocks(nn.Module):
    """Three layers, one after the other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x
