"""A rank that dies, hangs or raises in its backward, or has another compressor: the others raise, under every wrapper."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.backend
from gradwire.ddp_core.transport.torch_groups import group_limit, store_of
from gradwire.hooks.local_sgd.arguments import ranks_of
from gradwire.hooks.local_sgd.fixed_sites import WAITS

from ...ddp_core.errors import message_of, shorten
from ...ranks import LostRank
from ..fsdp.given import GivenParts
from .wrappers import EVERY, WRAPPERS, Training, over

SHORT, LONG = timedelta(seconds=1), timedelta(seconds=60)
STEPS = 2  # before it
NAMED = "(parameters parts."


def dies():
    os._exit(3)


def hangs():
    store_of(dist.group.WORLD).wait(["rank 0 raised"], LONG)


def raises():
    raise ZeroDivisionError("on purpose")


def trained(wrapper, act):
    """A training after some steps, in whose next backward rank 1 acts."""
    training = Training(wrapper, timeout=LONG)
    training.steps(0, STEPS)
    if training.rank == 1:
        part = next(each for each in training.model.modules() if isinstance(each, GivenParts)).parts[0]
        part.register_forward_hook(lambda _, given, loss: loss.register_hook(lambda _: act()) and None)
    return training


def beside_a_death(rank, world_size, wrapper):
    trained(wrapper, dies).step(STEPS)


@over(*WRAPPERS, "own, unused", leave_out=["HSDP by torch"])  # whose ranks wait by torch
def test_when_a_rank_dies_the_others_raise_soon_and_name_it_and_parameters(ranks, wrapper):
    answers = ranks.run(beside_a_death, max(3, EVERY[wrapper].world_size), wrapper, expect_errors=True)
    assert answers.pop(1) == LostRank(1, "died with exit code 3")
    for failure in answers:
        assert NAMED in failure.message
        assert "rank 1 has ended" in failure.message or wrapper == "HSDP"  # where others may hear of those that heard
        assert failure.seconds < LONG.total_seconds() / 2


def disturbed(rank, world_size, wrapper, act):
    """What the next two steps raise, and the seconds until the first did."""
    training = trained(wrapper, act)
    shorten(training.handle, SHORT, training.model.reducer if "own" in wrapper else None)
    dist.barrier()
    began = time.monotonic()
    first = message_of(training.step, STEPS)
    seconds = time.monotonic() - began
    store_of(dist.group.WORLD).set(f"rank {rank} raised", "")
    return first, message_of(training.step, STEPS + 1), seconds


@pytest.mark.parametrize("act", [hangs, raises])
@over("attach", "comm_hook", "own", "own, unused")
def test_when_a_rank_hangs_or_raises_the_others_raise_within_the_time_limit_and_it_says_why(ranks, wrapper, act):
    (message, then, seconds), late = ranks.run(disturbed, 2, wrapper, act)
    assert NAMED in message
    assert "reduces no more gradients" in then or "no longer in step" in then
    assert seconds < LONG.total_seconds() / 2
    assert act is raises or seconds > 0.9 * SHORT.total_seconds()
    assert (late[0] == "ZeroDivisionError: on purpose") == (act is raises)
    assert late[1].startswith("RuntimeError")  # in the step before it may have had all it needs
    assert act is hangs or "Expected to have finished reduction" in late[1]
    assert act is hangs or "own" not in wrapper or "a backward that raised an error" in late[1]


def differing(rank, world_size, wrapper, swaps):
    """Rank 1 has another compressor, from the start or by a swap."""
    training = Training(wrapper, "int8" if rank == 1 and not swaps else "int4", timeout=LONG)
    if swaps:
        training.steps(0, STEPS)
        if rank == 1:
            training.swap("int8")
    training.steps(STEPS, STEPS + 2)


@pytest.mark.parametrize("swaps", [False, True])
@over(leave_out=["HSDP", "HSDP by torch"])
def test_ranks_that_differ_all_say_so(ranks, wrapper, swaps):
    for failure in ranks.run(differing, 2, wrapper, swaps, expect_errors=True):
        assert "set up differently" in failure.message or "expects same model" in failure.message
        assert swaps or all(text in failure.message.lower() for text in ("rank 0 has", "rank 1 has", "int4", "int8"))


def caught(rank, world_size, wrapper):
    """What a backward of all ranks raises, and the step behind it where that error was caught."""
    training = Training(wrapper, timeout=LONG)
    training.steps(0, STEPS)
    part = next(each for each in training.model.modules() if isinstance(each, GivenParts)).parts[0]
    hook = part.register_forward_hook(lambda _, given, loss: loss.register_hook(lambda _: raises()) and None)
    first = message_of(training.step, STEPS)
    hook.remove()
    return first, message_of(training.step, STEPS + 1)


@over("FSDP2", "HSDP", "replicate")
def test_fsdp2_that_changes_no_parameter_after_an_error_of_backward_refuses_to_train_on(ranks, wrapper):
    for first, then in ranks.run(caught, EVERY[wrapper].world_size, wrapper):
        assert first == "ZeroDivisionError: on purpose"
        assert then.startswith(
            "RuntimeError: a backward of this model raised an error, and since then torch's FSDP2 and"
        )


def of_direct(rank, world_size):
    """The limit of a group of the backend `gradwire`."""
    group = dist.new_group(backend="gradwire", timeout=timedelta(seconds=5))
    return group_limit(group).total_seconds()


def test_the_limit_of_the_backend_of_gradwire_is_known_too(ranks):
    assert ranks.run(of_direct, 2) == [5, 5]


def limits(rank, world_size):
    """The limits of waits of models whose group has one of its own, without a limit of theirs and with one."""
    group, one = dist.new_group(timeout=timedelta(seconds=7)), timedelta(seconds=3)
    found = []
    for options in ({}, {"timeout": one}):
        attached = gradwire.attach(DistributedDataParallel(nn.Linear(2, 2), process_group=group), "int8", **options)
        own = gradwire.DistributedDataParallel(nn.Linear(2, 2), process_group=group, compressor="int8", **options)
        of_local_steps = ranks_of(group, options.get("timeout"))
        for handle in (attached, own.compression):
            found.append(handle.averager.engines.timeout.total_seconds())
        found.append(of_local_steps.patience / WAITS)
    return found


def test_waits_have_the_limit_of_the_process_group_unless_they_are_given_one(ranks):
    assert ranks.run(limits, 2) == [[7, 7, 7, 3, 3, 3]] * 2
