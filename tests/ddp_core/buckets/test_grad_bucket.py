"""Buckets and memory: gradients as views, what a communication hook sees, what is left when a model is gone."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.ddp_core.buckets.grad_bucket import LARGE, GradBucket
from gradwire.kernels import backends, use_backend

from ..behaviour.test_equivalence import train
from ..layers import DYNAMIC, Layers, gradients_of, inputs_of
from ..nets import ALWAYS, Batch, Net, Settings, SparseRows, loss_of, same

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
        buffers = storages([bucket.buffer() for bucket in model.reducer.plan.buckets])
        gradients = storages([parameter.grad for parameter in parameters])
        answers.append((buffers == gradients, sum(buffers.values()), sum(p.nbytes for p in parameters)))
    model.compression.close()
    return answers


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001}, {"find_unused_parameters": True}], ids=str)
def test_with_views_the_only_memory_of_gradients_is_that_of_the_buckets(ranks, options):
    for answers in ranks.run(aliased, 2, options):
        for same_memory, buffers, parameters in answers:
            assert same_memory
            assert buffers == parameters


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(6))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def copied_at_once(rank, world_size):
    """At each gradient of the first backward: how many gradients are still in memory of their own."""
    model = gradwire.DistributedDataParallel(Wide(), gradient_as_bucket_view=True)
    parameters, own = list(model.parameters()), []
    assert all(parameter.nbytes >= LARGE for parameter in parameters)

    def count(_):
        buffers = storages([bucket.buffer() for bucket in model.reducer.plan.buckets])
        gradients = storages([parameter.grad for parameter in parameters if parameter.grad is not None])
        own.append(len(gradients.keys() - buffers.keys()))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    model(torch.ones(2, 128)).sum().backward()
    model.compression.close()
    return own


def test_with_views_a_large_gradient_gives_its_own_memory_back_as_soon_as_it_is_there(ranks):
    for own in ranks.run(copied_at_once, 2):
        assert own == [1] * 6


def all_gone(rank, world_size, options):
    """Whether a model, its reducer and its compression are gone when the last name is."""
    model = gradwire.DistributedDataParallel(Layers(), **options)
    model(inputs_of(rank), (0, 1, 2, 3)).square().sum().backward()
    left = [weakref.ref(each) for each in (model, model.reducer, model.compression, model.reducer.plan.buckets[0])]
    del model
    gc.collect()
    return [reference() is None for reference in left]


@pytest.mark.parametrize("options", [{}, DYNAMIC, {"static_graph": True}, {"compressor": "powersgd"}], ids=str)
def test_nothing_outlives_a_model(ranks, options):
    assert ranks.run(all_gone, 2, options) == [[True] * 4] * 2


class Seen:
    """A communication hook that notes what it is handed and averages in a tensor of its own."""

    def __init__(self, model):
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.notes = []

    def __call__(self, state, bucket):
        self.notes.append(
            (bucket.index(), bucket.is_last(), [self.names[parameter] for parameter in bucket.parameters()])
        )
        parts = zip(bucket.parameters(), bucket.gradients(), strict=True)
        assert all(part.shape == parameter.shape and same([part], [parameter.grad]) for parameter, part in parts)
        assert sum(part.numel() for part in bucket.gradients()) == bucket.buffer().numel()
        bucket.set_buffer(bucket.buffer().clone())
        assert all(same([part], [p.grad]) for p, part in zip(bucket.parameters(), bucket.gradients(), strict=True))
        return default_hooks.allreduce_hook(None, bucket)


def hooked(rank, world_size, view):
    """Parameters with a hook of the user's, and without one in torch's; what the hook was handed in the last step."""
    settings = Settings(steps=3)
    model = gradwire.DistributedDataParallel(Net(DENSE), bucket_cap_mb=0.002, gradient_as_bucket_view=view)
    hook = Seen(model.module)
    model.register_comm_hook(None, hook)
    mine, gradients = train(model, rank, settings)
    expected, torch_s = train(TorchDDP(Net(DENSE), bucket_cap_mb=0.002), rank, settings)
    count = len(model.reducer.plan.buckets)
    return same(mine, expected) and same(gradients, torch_s), hook.notes[-count:], len(hook.names)


@pytest.mark.parametrize("view", [False, True])
def test_a_communication_hook_sees_every_gradient_in_its_shape_in_buckets_in_order(ranks, view):
    for equal, notes, parameters in ranks.run(hooked, 2, view):
        assert equal
        assert [index for index, _, _ in notes] == list(range(len(notes)))
        assert [last for _, last, _ in notes] == [False] * (len(notes) - 1) + [True]
        names = [name for _, _, names in notes for name in names]
        assert len(set(names)) == len(names) == parameters - 1  # the frozen one


def hooked_dropping(rank, world_size):
    """The buckets that a user's hook is handed, when layers are dropped."""
    model = gradwire.DistributedDataParallel(Layers(), **DYNAMIC, skip_all_reduce_unused_params=True)
    seen = []

    def hook(state, bucket):
        seen.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    model(inputs_of(rank), (3, 1)).square().sum().backward()
    return seen, [gradient is None for gradient in gradients_of(model)]


def test_a_communication_hook_is_not_called_for_a_bucket_that_no_rank_used(ranks):
    for seen, missing in ranks.run(hooked_dropping, 2):
        assert seen == [0, 2]
        assert missing == [True, True, False, False, True, True, False, False]


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
