"""What some ranks do and others do not: noticed soon, and named on all of them."""

import dataclasses
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

import gradwire

from .given import Given, average, compressed, gradients
from .test_failures import error_of

SHAPES = ((40, 30), (40,), (50, 40))
LIMIT, SOON = timedelta(seconds=50), 20.0
OTHER = {"none": "bf16", "topk:ratio=0.1": "onebit", "powersgd:rank=1": "none"}


def wrapped(spec, kind):
    return compressed(kind, Given(SHAPES), spec, {"bucket_cap_mb": 0.002}, timeout=LIMIT)


def changed(rank, world_size, kind, change, spec, who):
    """What two steps raise after a change on the ranks `who` alone; and whether a loaded state is of an earlier step."""
    model, handle = wrapped(spec, kind)
    saved = None
    for step in range(3):
        average(model, gradients(rank, step, SHAPES))
        saved = saved or handle.state_dict()
    dist.barrier()
    if rank in who:
        handle.swap(OTHER[spec]) if change == "swap" else handle.load_state_dict(saved)
    found = [error_of(average, model, gradients(rank, step, SHAPES)) for step in (3, 4)]
    dist.barrier()
    handle.close()
    return found


@pytest.mark.parametrize(
    ("kind", "change", "spec", "who"),
    [
        ("own", "swap", "none", (0,)),
        ("own", "swap", "topk:ratio=0.1", (1, 2)),
        ("own", "load", "powersgd:rank=1", (0,)),
        ("attached", "swap", "powersgd:rank=1", (1, 2)),
        ("attached", "load", "topk:ratio=0.1", (0,)),
        ("attached", "load", "none", (1, 2)),
    ],
)
def test_a_change_on_some_ranks_only_is_an_error_on_all_that_names_them(ranks, kind, change, spec, who):
    others = [rank for rank in range(3) if rank not in who]
    for (raised, message, seconds), (then, _, more) in ranks.run(changed, 3, kind, change, spec, who):
        assert raised in ("ValueError", "RuntimeError")
        assert "the ranks were set up differently" in message
        assert (
            f"ranks {list(who)} have swapped the compressor or loaded a state, and ranks {others} have not" in message
        )
        assert then
        assert seconds + more < SOON


def late(rank, world_size, kind):
    """The errors of steps with a swap on all ranks, of which one comes late."""
    model, handle = wrapped("topk:ratio=0.1", kind)
    messages = []
    for step in range(4):
        if step == 2:
            time.sleep(0.5 * (rank == 1))
            handle.swap("onebit")
            time.sleep(0.5 * (rank == 0))
        messages.append(error_of(average, model, gradients(rank, step, SHAPES))[1])
    handle.close()
    return messages


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_ranks_may_take_their_time_to_swap(ranks, kind):
    assert ranks.run(late, 2, kind) == [[""] * 4] * 2


def other_steps(rank, world_size):
    """What a swap at another step on each rank raises."""
    model, handle = wrapped("topk:ratio=0.1", "attached")
    average(model, gradients(rank, 0, SHAPES))
    message = ""
    for step in range(1, 4):
        if step == 1 + rank:
            handle.swap("onebit")
        message = message or error_of(average, model, gradients(rank, step, SHAPES))[1]
    handle.close()
    return message


def test_a_swap_at_different_steps_is_named(ranks):
    for message in ranks.run(other_steps, 2):
        assert "before step 2 since the start ranks [0] have swapped" in message


def given_in_two_ways(rank, world_size, kind):
    """What a step raises where rank 0 is given an object and rank 1 its text."""
    text = "powersgd:rank=1"
    model, handle = wrapped(text if rank else dataclasses.replace(gradwire.compressor(text)), kind)
    average(model, gradients(rank, 0, SHAPES))
    handle.close()


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_an_object_and_the_text_that_builds_an_equal_one_are_the_same_compressor(ranks, kind):
    assert ranks.run(given_in_two_ways, 2, kind) == [None, None]
