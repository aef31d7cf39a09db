"""Gradients that are lazy views, with the conjugate or the negative bit, are averaged as the numbers that they stand for."""

import pytest
import torch
from torch import nn

import gradwire

from ...torch_versions import complex_numbers

SIZE = 4
LARGE = 80  # rows and columns of a weight above the size from which gradients are copied one by one


class NegativeView(torch.autograd.Function):
    """The identity, whose gradient is a view with the negative bit."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch._neg_view(-grad)


class Fixed(nn.Module):
    """A weight, used as `use` says, and another one."""

    def __init__(self, use, size, dtype):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(size, size, dtype=dtype))
            self.other = nn.Parameter(torch.randn(3, dtype=dtype))
        self.use = use

    def forward(self, inputs):
        return self.use(self.weight, inputs).abs().square().sum() + self.other.abs().square().sum()


USES = {
    "conj": (lambda weight, inputs: weight.conj() @ inputs, torch.complex128),
    "vecdot": (torch.linalg.vecdot, torch.complex128),
    "imag of the conjugate": (lambda weight, inputs: weight.conj().imag, torch.complex128),
    "negative view": (lambda weight, inputs: NegativeView.apply(weight) @ inputs, torch.float64),
}


def inputs_of(rank, size, dtype):
    return torch.randn(size, size, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def errors(rank, world_size, use, alias):
    """How far gradients are from the mean of all ranks', of two steps: before and after buckets are made anew."""
    (function, dtype), found = USES[use], []
    for size in (SIZE, LARGE):
        model = gradwire.DistributedDataParallel(Fixed(function, size, dtype), gradient_as_bucket_view=alias)
        alone = Fixed(function, size, dtype)
        for other in range(world_size):
            alone(inputs_of(other, size, dtype)).div(world_size).backward()
        for _ in range(2):
            model.zero_grad()
            model(inputs_of(rank, size, dtype)).backward()
            found.append((model.module.weight.grad - alone.weight.grad).abs().max().item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # writes to all gradients at once
    return found


@complex_numbers
@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_lazy_gradient_is_averaged_as_the_numbers_it_stands_for(ranks, use, alias):
    for found in ranks.run(errors, 2, use, alias):
        assert max(found) < 1e-9
