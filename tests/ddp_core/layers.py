"""A model whose layers are chosen call by call, and what its gradients should be."""

import torch
from torch import nn

from .nets import WIDTH, linear

LAYER = 8 * (WIDTH * WIDTH + WIDTH)  # bytes
CAP = LAYER / 2**20  # in MiB: a layer a bucket
DYNAMIC = {"find_unused_parameters": True, "bucket_cap_mb": CAP}


class Layers(nn.Module):
    """Four layers; `forward(inputs, used)` is the sum of the outputs of those that are listed."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.layers = nn.ModuleList(linear() for _ in range(4))

    def forward(self, inputs, used):
        return inputs + sum(self.layers[index](inputs) for index in used)


def inputs_of(rank, step=0):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)


def gradients_of(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def summed(parts):
    """The sums of gradients of several backwards; None where none has brought any."""
    given = [[grad for grad in grads if grad is not None] for grads in zip(*parts, strict=True)]
    return [sum(grads) if grads else None for grads in given]


def expected_average(subsets, step=0):
    """By hand: the mean over ranks of what each would get alone; None where no rank uses a parameter."""
    alone = []
    for rank, used in enumerate(subsets):
        net = Layers()
        net(inputs_of(rank, step), used).square().sum().backward()
        alone.append(gradients_of(net))
    return [None if grad is None else grad / len(subsets) for grad in summed(alone)]
