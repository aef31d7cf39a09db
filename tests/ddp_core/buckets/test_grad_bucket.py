"""A bucket of gradients: gradients as views of it, and what it refuses."""

import pytest
import torch
from torch import nn

import gradwire
from gradwire.ddp_core.buckets.grad_bucket import LARGE, GradBucket
from gradwire.kernels import backends, use_backend

from ...torch_versions import complex_numbers
from ..nets import ALWAYS, Batch, Net, SparseRows, loss_of

DENSE = tuple(part for part in ALWAYS if part is not SparseRows)


def storages(tensors):
    """{address: bytes} of the memory behind tensors."""
    found = [tensor.untyped_storage() for tensor in tensors if tensor.numel()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def aliased(rank, world_size, options):
    """For each step and way of clearing: whether gradients are the buffers, and the buffers as large as the parameters."""
    model = gradwire.DistributedDataParallel(Net(DENSE), gradient_as_bucket_view=True, **options)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    answers = []
    for step, set_to_none in enumerate([True, True, False, False, True]):
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model(Batch.drawn(rank, step))).backward()
        buffers = storages([bucket.buffer() for bucket in model.reducer.assignment.buckets])
        gradients = storages([parameter.grad for parameter in parameters])
        answers.append((buffers == gradients, sum(buffers.values()), sum(p.nbytes for p in parameters)))
    return answers


@complex_numbers
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001}, {"find_unused_parameters": True}], ids=str)
def test_with_views_the_only_memory_of_gradients_is_that_of_the_buckets(ranks, options):
    for answers in ranks.run(aliased, 2, options):
        for same_memory, buffers, parameters in answers:
            assert same_memory
            assert buffers == parameters


def copied_at_once(rank, world_size):
    """At each gradient of the first backward: how many gradients are still in memory of their own."""
    net = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
    model = gradwire.DistributedDataParallel(net, gradient_as_bucket_view=True)
    parameters, own = list(model.parameters()), []
    assert all(parameter.nbytes >= LARGE for parameter in parameters)

    def count(_):
        buffers = storages([bucket.buffer() for bucket in model.reducer.assignment.buckets])
        gradients = storages([parameter.grad for parameter in parameters if parameter.grad is not None])
        own.append(len(gradients.keys() - buffers.keys()))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    model(torch.ones(2, 128)).sum().backward()
    return own


def test_with_views_a_large_gradient_gives_its_own_memory_back_as_soon_as_it_is_there(ranks):
    assert ranks.run(copied_at_once, 2) == [[1] * 6] * 2


def test_a_bucket_refuses_another_number_of_elements():
    bucket = GradBucket(0, [0], [nn.Parameter(torch.zeros(3))], last=True, alias=False)
    with pytest.raises(ValueError, match="a bucket of 3 elements cannot hold 4"):
        bucket.set_buffer(torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_gradients_are_scaled_to_the_bits_of_a_product_wherever_they_lie(dtype, kernels):
    if kernels == "native" and (reason := next(each.reason for each in backends() if each.name == kernels)):
        pytest.skip(reason)
    numbers = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (300, 40_000, 7)]
    bucket = GradBucket(0, range(3), parameters, last=True, alias=True)
    for fresh in ([0, 1, 2], [0, 1], [0], []):  # the others lie in the bucket already
        for place in fresh:
            parameters[place].grad = torch.randn(parameters[place].shape, generator=numbers).to(dtype)
        expected = torch.cat([parameter.grad.clone() for parameter in parameters]) * (1 / 3)
        bucket.open(1 / 3)
        with torch.no_grad(), use_backend(kernels, "reference"):
            bucket.fill([1, 1, 1])
        assert torch.equal(bucket.buffer(), expected)
        bucket.deliver(bucket.buffer(), None)
