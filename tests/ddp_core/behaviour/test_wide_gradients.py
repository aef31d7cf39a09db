"""Parameters of 16 bits whose gradients have 32, by `grad_dtype`: these are averaged as they are."""

import pytest
import torch
from torch import nn

import gradwire

WIDTH = 8

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(2)))
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    return net


def backward(model, rank):
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16()
    model(inputs).float().square().sum().backward()


def errors(rank, world_size, alias, compressor):
    """How far averages are from the mean of all ranks' gradients, over the largest, in the second step; their dtypes."""
    model = gradwire.DistributedDataParallel(network(), gradient_as_bucket_view=alias, compressor=compressor)
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
    means = [torch.zeros_like(each, dtype=torch.float64) for each in model.parameters()]
    for other in range(world_size):
        alone = network()
        backward(alone, other)
        for mean, each in zip(means, alone.parameters(), strict=True):
            mean.add_(each.grad, alpha=1 / world_size)
    largest = max(mean.abs().max().item() for mean in means)
    found = [(each.grad - mean).abs().max().item() for each, mean in zip(model.parameters(), means, strict=True)]
    handle = gradwire.DistributedDataParallel(network(), compressor=compressor).compression
    handle.load_state_dict(model.compression.state_dict())
    return max(found) / largest, {each.grad.dtype for each in model.parameters()}


@pytest.mark.parametrize(("compressor", "tolerance"), [("none", 1e-6), ("int8", 3e-2)])
@pytest.mark.parametrize("alias", [False, True])
def test_wide_gradients_as_views_of_buckets_too_are_averaged_without_rounding(ranks, alias, compressor, tolerance):
    for error, dtypes in ranks.run(errors, 2, alias, compressor):
        assert error < tolerance
        assert dtypes == {torch.float32}
