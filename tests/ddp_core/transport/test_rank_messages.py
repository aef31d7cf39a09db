"""What ranks exchange outside of programs."""

import os
from datetime import timedelta

import pytest
import torch

import gradwire
from gradwire.compress import AllGather
from gradwire.ddp_core.transport import process_group


class OfOneGpu:
    """A group of one rank that carries no tensors on the CPU, and keeps where those are that it is given."""

    def __init__(self):
        self.devices = []

    def size(self):
        return 1

    def rank(self):
        return 0

    def allgather(self, rows, mine):
        self.devices.append(mine[0].device)


def test_a_message_travels_by_way_of_the_rank_s_own_gpu_where_the_group_has_no_backend_on_the_cpu(monkeypatch):
    monkeypatch.setattr(process_group, "carries", lambda group, device: device.type != "cpu")
    monkeypatch.setattr(process_group, "takes_time_limits", lambda *_: True)
    monkeypatch.setattr(process_group, "message_limit", lambda *_: timedelta(seconds=9))
    group = OfOneGpu()
    process_group.over(group, torch.device("meta")).message(AllGather(torch.zeros(3)))
    assert group.devices == [torch.device("meta")]


KINDS = ("float8_e4m3fn", "float8_e5m2", "int16", "uint16", "uint32", "uint64", "bool", "complex64", "float64")


class Buffered(torch.nn.Module):
    """With a buffer of each kind: one of no axes, one with gaps, an empty one."""

    def __init__(self, rank):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        for kind in KINDS:
            numbers = torch.arange(12).view(3, 4).mul(rank + 1).to(getattr(torch, kind))
            self.register_buffer(f"{kind}_one", numbers[0, 1].clone())
            self.register_buffer(f"{kind}_gaps", numbers[:, ::2])
            self.register_buffer(f"{kind}_none", numbers[:0])

    def forward(self, inputs):
        return self.layer(inputs)


def buffers_of_every_kind(rank, world_size):
    """What the buffers have become with the first forward, as float64."""
    model = gradwire.DistributedDataParallel(Buffered(rank))
    model(torch.ones(2, 4)).sum().backward()
    return {name: buffer.to(torch.complex128) for name, buffer in model.module.named_buffers()}


def test_buffers_of_every_kind_become_those_of_rank_0(ranks):
    expected = {name: buffer.to(torch.complex128) for name, buffer in Buffered(0).named_buffers()}
    for found in ranks.run(buffers_of_every_kind, 2):
        assert all(torch.equal(found[name], numbers) for name, numbers in expected.items())


EXCHANGE = "the ranks could not exchange "
PHASES = {  # of which rank 1 stays away: what rank 0 says
    "construction": f"{EXCHANGE}the models that they train",
    "buffers": f"{EXCHANGE}their parameters and buffers",
    "first step": "ranks [0] have come to their first bucket of gradients and waited",
    "second step": f"{EXCHANGE}whether they have swapped the compressor or loaded a state",
}
LIMITS, DEFAULT = {"first step": timedelta(seconds=3)}, timedelta(minutes=5)


def left_alone(rank, world_size, phase):
    """What rank 0 raises where rank 1 stays away from a phase, and then goes."""
    if rank and phase == "construction":
        raise RuntimeError("on purpose")
    kind = torch.nn.BatchNorm1d(4) if phase == "buffers" else torch.nn.Linear(4, 4)
    model = gradwire.DistributedDataParallel(
        kind, init_sync=phase == "construction", timeout=LIMITS.get(phase, DEFAULT)
    )
    for step in range(2):
        if rank and (phase != "second step" or step):
            raise RuntimeError("on purpose")
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("phase", PHASES)
def test_an_error_says_what_ranks_waited_for(ranks, phase):
    message, _ = ranks.run(left_alone, 2, phase, expect_errors=True)
    assert PHASES[phase] in str(message)


def ends_before_its_first_bucket(rank, world_size):
    """What rank 0 raises where rank 1 ends between the making of its model and its first backward."""
    model = gradwire.DistributedDataParallel(torch.nn.Linear(4, 4), compressor="int8")
    if rank:
        os._exit(1)
    model(torch.ones(2, 4)).sum().backward()


def test_a_rank_that_ends_before_its_first_bucket_is_named_long_before_the_limit(ranks):
    message, _ = ranks.run(ends_before_its_first_bucket, 2, expect_errors=True)
    assert "ranks [1] have ended. ranks [0] have come to their first bucket" in str(message)


def saves_alone(rank, world_size):
    """What rank 0 raises in a save where rank 1 ends before it."""
    model = gradwire.DistributedDataParallel(torch.nn.Linear(4, 4), compressor="int8")
    model(torch.ones(2, 4)).sum().backward()
    if rank:
        os._exit(1)
    model.compression.gather_state_dict()


def test_a_save_does_not_wait_for_a_rank_that_has_ended(ranks):
    message, _ = ranks.run(saves_alone, 2, expect_errors=True)
    assert "ranks [1] have ended" in str(message)
