"""torch's DDP with gradwire's hook, whose buckets take turns as on a GPU: it trains as by lanes, on all ranks."""

import copy
import functools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.hooks.torch_ddp import compress_bucket, handle_for

from ..ddp_core.streams import side_streams_on_cpu
from .test_ddp_settings import USED, Branches, layer_by_layer, network, skipping
from .training import TINY_BUCKETS, Case, batch, same, train

SPECS = ("none", "bf16", "int8", "powersgd:rank=2", "topk:ratio=0.1")
UNUSED = ((True, True, False, True, True), (True, False, True, False, True))
KINDS = {
    "plain": lambda rank: Case(network),
    "static": lambda rank: Case(network, options={**TINY_BUCKETS, "static_graph": True}),
    "views": lambda rank: Case(network, options={**TINY_BUCKETS, "gradient_as_bucket_view": True}),
    "unused": lambda rank: Case(
        functools.partial(Branches, UNUSED[rank]), options={**TINY_BUCKETS, "find_unused_parameters": True}
    ),
}


def both_ways(rank, world_size, trains):
    """What a training returns by lanes, and by turns."""
    torch.manual_seed(0)
    lanes = trains(rank)
    with pytest.MonkeyPatch.context() as patched:
        side_streams_on_cpu(patched)
        torch.manual_seed(0)
        return lanes, trains(rank)


def parameters(spec, kind, rank):
    return train(rank, spec, KINDS[kind](rank)).parameters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_turns_train_as_lanes_do(ranks, spec, kind):
    for lanes, turns in ranks.run(both_ways, 2, functools.partial(parameters, spec, kind)):
        assert same(lanes, turns)


def with_last_buckets_left_out(rank):
    """Steps whose last bucket no rank used."""
    ddp = layer_by_layer()
    handle, gradients = gradwire.attach(ddp, "powersgd:rank=1"), []
    for step, used in enumerate(USED):
        ddp.zero_grad()
        ddp(batch((3, 12), rank, step), used).backward()
        gradients += [layer.weight.grad.clone() for layer in ddp.module.layers if layer.weight.grad is not None]
    handle.close()
    return gradients


def with_uneven_inputs(rank):
    """A rank that has joined mirrors all buckets."""
    ddp = DistributedDataParallel(network(), **TINY_BUCKETS)
    handle = gradwire.attach(ddp, "int8")
    with ddp.join():
        for step in range(2 + rank):
            ddp(batch((4, 12), rank, step)).sum().backward()
    handle.close()
    return [each.grad for each in ddp.parameters()]


def with_a_state_of_other_buckets(rank):
    """One bucket has several programs after a load."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=0.001)
    handle = gradwire.attach(ddp, "powersgd:rank=2")
    for step in range(2):
        ddp(batch((4, 12), rank, step)).sum().backward()
    saved = copy.deepcopy(handle.state_dict())
    handle.close()
    ddp = DistributedDataParallel(ddp.module, bucket_cap_mb=25)
    handle = gradwire.attach(ddp, "powersgd:rank=2")
    handle.load_state_dict(saved)
    ddp.zero_grad()
    ddp(batch((4, 12), rank, 2)).sum().backward()
    handle.close()
    return [each.grad for each in ddp.parameters()]


def a_hook_that_waits(rank):
    """A hook around gradwire's that waits for each bucket."""
    ddp = DistributedDataParallel(network(), **TINY_BUCKETS)
    handle = handle_for("int8", ddp)

    def waits(state, bucket):
        future = torch.futures.Future()
        future.set_result(compress_bucket(handle, bucket).wait())
        return future

    ddp.register_comm_hook(None, waits)
    ddp(batch((4, 12), rank, 0)).sum().backward()
    handle.close()
    return [each.grad for each in ddp.parameters()]


@pytest.mark.parametrize(
    "trains",
    [
        pytest.param(with_last_buckets_left_out, marks=skipping),
        with_uneven_inputs,
        with_a_state_of_other_buckets,
        a_hook_that_waits,
    ],
)
def test_steps_of_other_kinds_train_as_lanes_do(ranks, trains):
    for lanes, turns in ranks.run(both_ways, 2, trains):
        assert same(lanes, turns)


def which_are_there_at_once(rank, static):
    ddp, there = DistributedDataParallel(network(), **TINY_BUCKETS, static_graph=static), []
    handle = handle_for("int8", ddp)

    def notes(state, bucket):
        future = compress_bucket(handle, bucket)
        there.append(future.done())
        return future

    ddp.register_comm_hook(None, notes)
    for step in range(2):
        ddp(batch((4, 12), rank, step)).sum().backward()
    handle.close()
    return there


@pytest.mark.parametrize("static", [False, True])
def test_a_bucket_goes_on_behind_the_next_one_where_the_last_one_is_sure_to_come(ranks, static):
    for _, there in ranks.run(both_ways, 2, functools.partial(which_are_there_at_once, static=static)):
        assert all(there) == static
        assert there[-1]
