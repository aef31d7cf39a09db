"""What fails beside a program: a hook of the user's, and a rank for which another stands in."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

import gradwire

from ...ranks import LostRank
from ..errors import message_of
from ..layers import CAP, Layers, inputs_of

LONG = timedelta(seconds=60)


def step(model, rank, number):
    model(inputs_of(rank, number), range(4)).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.01)
    model.zero_grad()


def fails_on_rank_1(group, bucket):
    """A hook whose average of bucket 1 does not come on rank 1."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)

    def finished(done):
        if bucket.index() == 1 and dist.get_rank() == 1:
            raise ArithmeticError("on purpose")
        return bucket.buffer()

    return work.get_future().then(finished)


def with_a_hook(rank, world_size):
    model = gradwire.DistributedDataParallel(Layers(), bucket_cap_mb=CAP)
    model.register_comm_hook(dist.group.WORLD, fails_on_rank_1)
    return [message_of(step, model, rank, number) for number in (2, 3)[: 1 + rank]]


def test_a_hook_s_failed_average_is_named_and_the_next_step_says_that_it_did_not_come(ranks):
    good, (first, then) = ranks.run(with_a_hook, 2)
    assert good == [""]
    assert first.startswith("RuntimeError: bucket 1 (parameters layers.2.")
    assert "on purpose" in first
    assert "the averages of the step before did not all come" in then
    assert "on purpose" in then


def joined(rank, world_size):
    """Rank 0 has no inputs and stands in with zeros. Rank 2 dies in its third backward."""
    model = gradwire.DistributedDataParallel(Layers(), bucket_cap_mb=CAP, timeout=LONG)
    with model.join():
        for number in range(4 if rank else 0):
            if (rank, number) == (2, 2):
                model.module.layers[1].weight.register_hook(lambda _: os._exit(3))
            step(model, rank, number)


def test_when_a_rank_dies_those_that_stand_in_for_missing_inputs_raise_too(ranks):
    waiting, training, dead = ranks.run(joined, 3, expect_errors=True)
    assert dead == LostRank(2, "died with exit code 3")
    for failure in (waiting, training):
        assert failure.type_name == "RuntimeError"
        assert failure.message.startswith("bucket ")
        assert "(parameters layers." in failure.message
        assert failure.seconds < LONG.total_seconds() / 2
