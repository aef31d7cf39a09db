"""A rank that dies, hangs or raises in backward: the others raise within the time limit, and keep their parameters."""

import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import gradwire
from gradwire.ddp_core.transport.torch_groups import store_of

from ...ranks import LostRank
from ..errors import shorten
from ..layers import CAP, Layers, inputs_of

SHORT, LONG = timedelta(seconds=1), timedelta(seconds=60)
ALL = (0, 1, 2, 3)
OPTIONS = {
    "plain": {"gradient_as_bucket_view": True},
    "dropping": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "compressed": {"find_unused_parameters": True, "compressor": "powersgd:rank=2"},
}


def trained(rank):
    """A model for each of OPTIONS on a process group of its own, after two steps."""
    models = {}
    for name, options in OPTIONS.items():
        group = dist.new_group(backend="gloo")
        model = gradwire.DistributedDataParallel(
            Layers(), bucket_cap_mb=CAP, process_group=group, timeout=LONG, **options
        )
        for number in range(2):
            step(model, rank, number)
        models[name] = model
    return models


def step(model, rank, number):
    model(inputs_of(rank, number), ALL).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.01)
    model.zero_grad()


def attempted(model, rank, raised=lambda: None):
    """What the next two steps raise, the seconds until the first did, and whether parameters stayed as they were."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    messages, times = [], []
    for number in (2, 3):
        began = time.monotonic()
        try:
            step(model, rank, number)
        except (RuntimeError, ZeroDivisionError) as error:
            messages.append(f"{type(error).__name__}: {error}")
            times.append(time.monotonic() - began)
            raised()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return messages, times, unchanged


def check(name, answer, limit):
    messages, times, unchanged = answer
    assert len(messages) == 2, messages
    assert unchanged
    assert times[0] < limit
    if name == "dropping":
        assert "which parameters they used" in messages[0] or "(parameters layers." in messages[0]
    else:
        assert "bucket " in messages[0]
        assert "(parameters layers." in messages[0]


def beside_a_death(rank, world_size):
    models = trained(rank)
    dist.barrier()
    if rank == 1:
        models["plain"].module.layers[1].weight.register_hook(lambda _: os._exit(3))
    raise RuntimeError(json.dumps({name: attempted(model, rank) for name, model in models.items()}))


def test_when_a_rank_dies_the_others_raise_at_once_name_a_bucket_and_keep_their_parameters(ranks):
    first, dead, last = ranks.run(beside_a_death, 3, expect_errors=True)
    assert dead == LostRank(1, "died with exit code 3")
    for failure in (first, last):
        for name, answer in json.loads(failure.message).items():
            check(name, answer, LONG.total_seconds() / 2)
            assert "rank 1 has ended" in answer[0][0]


def disturbed(rank, world_size, disturb):
    """What the steps of every model raise, when rank 1 is disturbed in its backward, maybe until rank 0 raises."""
    answers, store = {}, store_of(dist.group.WORLD)
    for name, model in trained(rank).items():
        shorten(model.compression, SHORT, model.reducer)
        if rank == 1:
            model.module.layers[1].weight.register_hook(lambda _, name=name: disturb(store, name))
        dist.barrier()
        answers[name] = attempted(model, rank, lambda name=name: rank or store.set(name, "raised"))
    dist.barrier()
    return answers


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
    messages = attempted(model, rank)[0] if rank else [step(model, rank, 2)]
    model.compression.close()
    return messages


def test_a_hook_s_failed_average_is_named_and_the_next_step_says_that_it_did_not_come(ranks):
    good, (first, then) = ranks.run(with_a_hook, 2)
    assert good == [None]
    assert first.startswith("RuntimeError: bucket 1 (parameters layers.2.")
    assert "on purpose" in first
    assert "the averages of the step before did not all come" in then
    assert "on purpose" in then


def hangs(store, name):
    store.wait([name], LONG)


def raises(store, name):
    raise ZeroDivisionError("on purpose")


def test_when_a_rank_hangs_the_others_raise_within_the_time_limit_and_so_does_it_when_it_wakes(ranks):
    waiting, late = ranks.run(disturbed, 2, hangs)
    for name in OPTIONS:
        check(name, waiting[name], LONG.total_seconds() / 2)
        assert late[name][0]
        assert all(message.startswith("RuntimeError") for message in late[name][0])


def test_when_a_rank_raises_the_others_raise_within_the_time_limit_and_its_next_step_says_why(ranks):
    waiting, broken = ranks.run(disturbed, 2, raises)
    for name in OPTIONS:
        check(name, waiting[name], LONG.total_seconds() / 2)
        (first, then), _, unchanged = broken[name]
        assert first == "ZeroDivisionError: on purpose"
        assert "a backward that raised an error" in then
        assert unchanged


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
