"""A wrapper that is given up leaves nothing behind on the model: a new one takes over."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import gradwire

from .. import layers
from ..chain import Chain, inputs_of
from ..nets import same


def forgotten(rank, world_size):
    """Whether a wrapper is freed as soon as nobody holds it, without a garbage collection."""
    model = gradwire.DistributedDataParallel(Chain(), compressor="topk:ratio=0.5")
    for step in range(2):
        model(inputs_of(rank, step)).sum().backward()
    freed = weakref.ref(model)
    gc.disable()
    del model
    gone = freed() is None
    gc.enable()
    return gone


def test_a_wrapper_is_freed_with_its_last_reference(ranks):
    assert all(ranks.run(forgotten, 2))


def gradients_after(rank, give_up, *, held=True):
    """What a new wrapper averages on a module whose former one was given up, and may still be `held`; the mean by hand."""
    module = Chain()
    former = gradwire.DistributedDataParallel(module, bucket_cap_mb=1e-6)
    give_up(former, rank)
    former = former if held else None
    module.zero_grad()
    model = gradwire.DistributedDataParallel(module, bucket_cap_mb=1e-6)
    model(inputs_of(rank, 0)).square().sum().backward()
    mine = [parameter.grad.clone() for parameter in module.parameters()]
    alone = Chain()
    alone(inputs_of(rank, 0)).square().sum().backward()
    expected = [parameter.grad for parameter in alone.parameters()]
    for gradient in expected:
        dist.all_reduce(gradient.div_(dist.get_world_size()))
    model.compression.close()
    if held:
        former.compression.close()
    return mine, expected


def before_backward(former, rank):
    former(inputs_of(rank, 0)).sum()


def in_the_middle(former, rank):
    """An error of the user's code after the first buckets have left, noticed by the next forward."""

    def fail(gradient):
        raise ArithmeticError

    hook = former.module.layers[-1].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        former(inputs_of(rank, 0)).sum().backward()
    hook.remove()
    with pytest.raises(RuntimeError, match="finished reduction"):
        former(inputs_of(rank, 0))


def by_a_hook(former, rank):
    """An average that does not come."""

    def broken(state, bucket):
        future = torch.futures.Future()
        future.set_exception(RuntimeError("no average"))
        return future

    former.register_comm_hook(None, broken)
    with pytest.raises(RuntimeError, match="no average"):
        former(inputs_of(rank, 0)).sum().backward()


def taken_over(rank, world_size):
    given_up = gradients_after(rank, before_backward, held=False)
    return [given_up, gradients_after(rank, in_the_middle), gradients_after(rank, by_a_hook)]


def test_a_new_wrapper_takes_over_from_one_whose_step_failed(ranks):
    for results in ranks.run(taken_over, 2):
        for mine, expected in results:
            assert same(mine, expected)


def all_gone(rank, world_size, options):
    """Whether a model, its reducer and its compression are gone when the last name is."""
    model = gradwire.DistributedDataParallel(layers.Layers(), **options)
    model(layers.inputs_of(rank), (0, 1, 2, 3)).square().sum().backward()
    parts = (model, model.reducer, model.compression, model.reducer.assignment.buckets[0])
    left = list(map(weakref.ref, parts))
    del model, parts
    gc.collect()
    return [reference() is None for reference in left]


@pytest.mark.parametrize("options", [{}, layers.DYNAMIC, {"static_graph": True}, {"compressor": "powersgd"}], ids=str)
def test_nothing_outlives_a_model(ranks, options):
    assert ranks.run(all_gone, 2, options) == [[True] * 4] * 2
