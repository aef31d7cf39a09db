"""Memory that is gone with what it was for: closed handles, and buckets that were made anew."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.ddp_core.buckets.assignment import BucketAssignment

from ...torch_versions import fsdp_of_others

WIDTH, RANKS, SLICE = 64, 2, 4096  # bytes of a slice


def alive(references):
    gc.collect()
    return sum(each() is not None for each in references)


def kept_of_closed_handles(rank, world_size):
    """The number of closed handles' memories that are still there."""
    model, memories = nn.Linear(WIDTH, WIDTH), []
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    for _ in range(2):
        handle = gradwire.attach(model, reduce="int8")
        model(torch.ones(2, WIDTH)).sum().backward()
        handle.close()
        memories.append(weakref.ref(handle.averager.memory))
        del handle
    return alive(memories)


@fsdp_of_others
def test_a_model_keeps_no_residuals_of_closed_handles(ranks):
    assert ranks.run(kept_of_closed_handles, RANKS) == [0] * RANKS


class Disordered(nn.Module):
    """Layers that are not called in the order in which they were made."""

    def __init__(self):
        super().__init__()
        for place in range(3):
            self.add_module(f"small{place}", nn.Linear(WIDTH, WIDTH, bias=False))
            self.add_module(f"large{place}", nn.Linear(WIDTH, 4 * WIDTH, bias=False))

    def forward(self, inputs):
        for place in range(3):
            inputs = getattr(self, f"large{place}")(inputs).unflatten(-1, (4, WIDTH)).sum(-2)
        return self.small2(self.small1(self.small0(inputs)))


def kept_of_former_buckets(rank, world_size, spec):
    """The number of buckets in the first steps, and of former ones' memories and buffers that are still there."""
    model, former, found = gradwire.DistributedDataParallel(Disordered(), compressor=spec, bucket_cap_mb=0.07), [], []
    for step in range(3):
        model(torch.full((2, WIDTH), step + rank + 1.0)).square().mean().backward()
        memories = [each for _, each in model.compression.averager.memory.live]
        buffers = [bucket.buffer() for bucket in model.reducer.assignment.buckets]
        now = {id(each): each for each in memories + buffers}
        found.append((len(memories), alive(each for place, each in former if place not in now)))
        former = [(place, weakref.ref(each)) for place, each in now.items()]
        del memories, buffers, now
    return found


@pytest.mark.parametrize("spec", ["none", "int8"])
def test_fewer_buckets_than_before_leave_nothing_of_those(ranks, spec):
    assert ranks.run(kept_of_former_buckets, RANKS, spec) == [[(3, 0), (2, 0), (2, 0)]] * RANKS


def test_former_buckets_that_were_cut_are_gone_at_once():
    """Without a garbage collection: slices know their buckets."""
    parameters = [torch.nn.Parameter(torch.zeros(4 * SLICE // 4)) for _ in range(2)]
    assignment = BucketAssignment(parameters, [False] * 2, [1], alias=True)
    assignment.cut = SLICE
    gc.disable()
    try:
        assignment.build([1, 0])
        former = [weakref.ref(each) for each in assignment.buckets]
        assert len(assignment.sending) > len(former)
        assignment.build([0, 1])
        assert [each() for each in former] == [None] * len(former)
    finally:
        gc.enable()
