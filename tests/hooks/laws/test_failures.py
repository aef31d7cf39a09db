"""A rank that dies, hangs or raises in its backward, or has another compressor: the others raise, under every wrapper."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from gradwire.ddp_core.transport.torch_groups import store_of

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
