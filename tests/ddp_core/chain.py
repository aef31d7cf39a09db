"""A chain of layers in float32, and its training."""

import torch
from torch import nn

import gradwire

WIDTH = 12
SMALL = {"bucket_cap_mb": 1.5 * 4 * WIDTH * WIDTH / 2**20}  # two layers a bucket
STEPS = 5


class Chain(nn.Module):
    """Layers, registered in the order in which their gradients get ready: that of torch's first buckets, too."""

    def __init__(self, width=WIDTH, layers=5):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(8)
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, inputs):
        for layer in reversed(self.layers):
            inputs = layer(inputs).tanh()
        return inputs


def inputs_of(rank, step):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def wrapped(compressor="none", **options):
    model = gradwire.DistributedDataParallel(Chain(), compressor=compressor, **{**SMALL, **options})
    model.reducer.assignment.build(range(5))
    return model


def train(model, rank, steps=range(STEPS)):
    """The gradients of every step."""
    history = []
    for step in steps:
        model.zero_grad()
        model(inputs_of(rank, step)).square().sum().backward()
        history += [parameter.grad.clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)
    return [*history, *(parameter.detach().clone() for parameter in model.parameters())]
